"""Where the always-needed weights live: own memory, a warmed page cache, or mapped on demand.

`anon` reads them once with the lanes into our own pages at the addresses llama.cpp already uses:
they can no longer be pushed out by the page cache's own traffic, which costs a streamed model most
of its speed when memory is short. `warm` reads them through the page cache in one sweep; `mmap`
leaves them to page faults.

Weights of which a token reads one row (token embeddings) are no part of that under `anon`: they
stay pages of the file, where a row is one or two page faults, and their memory goes to experts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from engine.experts import ExpertLayer
from engine.graph import GraphPlan
from engine.lane_jobs import Read
from engine.lanes import Lanes
from engine.mapping import ShardMapping, page_ceil, page_floor
from engine.model_file import ModelFile, TensorEntry

DensePolicy = Literal["anon", "warm", "mmap"]
_CHUNK_BYTES = 4 << 20
"""Large enough for full disk speed, small enough that all lanes have work to the end."""

Range = tuple[int, int]


def bring_dense_weights(
    policy: DensePolicy,
    plan: GraphPlan,
    file: ModelFile,
    layers: Sequence[ExpertLayer],
    mappings: Sequence[ShardMapping],
    lanes: Lanes,
    progress: Callable[[float], None] | None = None,
) -> tuple[int, int]:
    """Bring a model's dense weights where `policy` wants them.

    Returns the bytes of all of them, and of those that stay in the file because only rows of them
    are read. Raises ReadError when the disk does.
    """
    whole = [file.tensors[name] for name in plan.dense_weights]
    rows = [file.tensors[name] for name in plan.row_weights]
    left = rows if policy == "anon" else []
    # Before anything is placed: a page that a row shares with other weights is theirs.
    for weight in left:
        first, last = page_floor(weight.offset), page_ceil(weight.offset + weight.nbytes)
        mappings[weight.shard].expect_random_reads(first, last)
    ranges = dense_ranges(whole if left else whole + rows, layers, len(mappings))
    place_dense_weights(policy, file, ranges, mappings, lanes, progress)
    return sum(weight.nbytes for weight in whole + rows), sum(weight.nbytes for weight in left)


def dense_ranges(
    weights: Iterable[TensorEntry], layers: Sequence[ExpertLayer], n_shards: int
) -> list[list[Range]]:
    """Page ranges by shard that hold dense weights or the edge of a bank, without bank insides."""
    wanted: list[list[Range]] = [[] for _ in range(n_shards)]
    inside: list[list[Range]] = [[] for _ in range(n_shards)]
    for weight in weights:
        wanted[weight.shard].append(
            (page_floor(weight.offset), page_ceil(weight.offset + weight.nbytes))
        )
    for layer in layers:
        for bank in layer.banks:
            end = bank.offset + bank.slice_bytes * bank.n_expert
            wanted[bank.shard].append((page_floor(bank.offset), bank.inside_first))
            wanted[bank.shard].append((bank.inside_last, page_ceil(end)))
            inside[bank.shard].append((bank.inside_first, bank.inside_last))
    return [subtract(union(want), union(out)) for want, out in zip(wanted, inside, strict=True)]


def union(ranges: Iterable[Range]) -> list[Range]:
    """Sorted, disjoint ranges that cover the same bytes."""
    merged: list[Range] = []
    for first, last in sorted(ranges):
        if first >= last:
            continue
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def subtract(ranges: Sequence[Range], holes: Sequence[Range]) -> list[Range]:
    """What of sorted, disjoint `ranges` lies outside sorted, disjoint `holes`."""
    left: list[Range] = []
    for first, last in ranges:
        for hole_first, hole_last in holes:
            if hole_last <= first or hole_first >= last:
                continue
            if hole_first > first:
                left.append((first, hole_first))
            first = max(first, hole_last)
        if first < last:
            left.append((first, last))
    return left


def place_dense_weights(
    policy: DensePolicy,
    file: ModelFile,
    ranges: Sequence[Sequence[Range]],
    mappings: Sequence[ShardMapping],
    lanes: Lanes,
    progress: Callable[[float], None] | None = None,
) -> int:
    """Bring the ranges where `policy` wants them; return the bytes read.

    Raises ReadError when the disk does.
    """
    if policy == "mmap":
        return 0
    total = sum(last - first for shard in ranges for first, last in shard)
    done = 0
    for shard, shard_ranges in enumerate(ranges):
        for first, last in shard_ranges:
            if policy == "anon":
                mappings[shard].claim(first, last)
        for group in _groups(shard, shard_ranges):
            if policy == "anon":
                lanes.read_all(group)
            else:
                _warm(file, group)
            done += sum(read.last - read.first for read in group)
            if progress is not None:
                progress(done / max(total, 1))
    return done


def _groups(shard: int, ranges: Sequence[Range]) -> Iterable[list[Read]]:
    """Chunked reads in file order, some at a time so that progress can be shown."""
    group: list[Read] = []
    for first, last in ranges:
        for start in range(first, last, _CHUNK_BYTES):
            group.append(Read(shard, start, min(start + _CHUNK_BYTES, last), None))
            if len(group) == 32:
                yield group
                group = []
    if group:
        yield group


def _warm(file: ModelFile, reads: Sequence[Read]) -> None:
    fd = os.open(file.paths[reads[0].shard], os.O_RDONLY)
    try:
        for read in reads:
            os.preadv(fd, [bytearray(read.last - read.first)], read.first)
    finally:
        os.close(fd)
