"""Which bytes count as dense, and that every one of them is read once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import synth, synth_tensors
from engine.dense import dense_ranges, subtract, union
from engine.experts import Bank, ExpertLayer
from engine.mapping import PAGE, ShardMapping, page_ceil, page_floor
from engine.model_file import TensorEntry
from tests import gate

ranges = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: (min(pair), max(pair))),
    max_size=8,
)


def bytes_of(found: list[tuple[int, int]]) -> set[int]:
    return {byte for first, last in found for byte in range(first, last)}


@given(ranges)
def test_union_covers_the_same_bytes_once(given_ranges: list[tuple[int, int]]) -> None:
    merged = union(given_ranges)
    assert bytes_of(merged) == bytes_of(given_ranges)
    assert all(a[1] < b[0] for a, b in pairwise(merged))


@given(ranges, ranges)
def test_subtract_leaves_what_is_outside(
    wanted: list[tuple[int, int]], holes: list[tuple[int, int]]
) -> None:
    left = subtract(union(wanted), union(holes))
    assert bytes_of(left) == bytes_of(wanted) - bytes_of(holes)


@given(st.lists(st.integers(1, 3 * PAGE), min_size=1, max_size=6), st.integers(1, 5))
def test_every_byte_is_dense_or_inside_a_bank(sizes: list[int], slice_pages: int) -> None:
    """Tensors and banks alternate without gaps; pages they share belong to the dense ranges."""
    weights, layers, offset = [], [], 100
    for number, size in enumerate(sizes):
        weights.append(TensorEntry(f"w{number}", 0, offset, size, "f32", (size // 4,)))
        offset += size
        bank = Bank(f"b{number}", 0, offset, slice_pages * 1000, 4)
        layers.append(ExpertLayer(number, (bank,)))
        offset += 4 * bank.slice_bytes
    (dense,) = dense_ranges(weights, layers, 1)
    inside = union(
        (bank.inside_first, bank.inside_last) for layer in layers for bank in layer.banks
    )
    assert not bytes_of(dense) & bytes_of(inside)
    covered = bytes_of(dense) | bytes_of(inside)
    assert set(range(100, offset)) <= covered
    assert all(first % PAGE == 0 and last % PAGE == 0 for first, last in dense)


@pytest.fixture(scope="module")
def tied_model(model_dir: Path) -> Path:
    """A model whose token embeddings are its output weights, too."""
    with pytest.MonkeyPatch.context() as patch:
        plans = synth_tensors.plan_tensors
        patch.setattr(
            synth,
            "plan_tensors",
            lambda shape: [plan for plan in plans(shape) if plan.name != "output.weight"],
        )
        folder = model_dir / "tied"
        folder.mkdir()
        return synth.write_model(folder / "tied.gguf", synth.shape_from_text("tiny"), seed=1)[0]


def pages_of_file(mapping: ShardMapping, first: int, last: int) -> int:
    """How many bytes of file offsets `first` to `last` are the file's pages and not our own."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *_ = line.split(maxsplit=5)
        start, end = (int(part, 16) - mapping.base for part in span.split("-"))
        if int(inode) == mapping.path.stat().st_ino:
            total += max(0, min(end, last) - max(start, first))
    return total


@pytest.mark.parametrize("kind", ["tiny", "tiny-split", "tiny-biased"])
@pytest.mark.parametrize("policy", ["anon", "warm", "mmap"])
def test_token_embeddings_stay_in_the_file(
    kind: str, policy: str, tiny_model: Callable[..., Path]
) -> None:
    with gate.open_session(tiny_model(kind), {"stream.dense-weights": policy}) as session:
        opened, info = session._opened, session.model_info
        table, output = (opened.file.tensors[f"{name}.weight"] for name in ("token_embd", "output"))
        # The pages that a table shares with other weights at its two ends are theirs.
        inside = page_ceil(table.offset), page_floor(table.offset + table.nbytes)
        assert inside[1] - inside[0] >= 4 * PAGE
        assert pages_of_file(opened.mappings[table.shard], *inside) == inside[1] - inside[0]
        span = page_floor(output.offset), page_ceil(output.offset + output.nbytes)
        in_file = pages_of_file(opened.mappings[output.shard], *span)
        assert in_file == (0 if policy == "anon" else span[1] - span[0])
        assert info.row_bytes == (table.nbytes if policy == "anon" else 0)
        # What is said before opening, from the header alone, is the same.
        assert opened.file.experts.row_bytes == table.nbytes
        assert info.dense_bytes == opened.file.experts.dense_bytes


def test_embeddings_that_are_the_output_too_are_in_memory(tied_model: Path) -> None:
    streamed = gate.run(tied_model, gate.EVICTING, poison=True)
    resident = gate.run(tied_model, gate.RESIDENT)
    # Such a random model says one thing for ever, so the gate's own look at variety must not apply.
    assert streamed.tokens == resident.tokens and streamed.counts["evictions"] > 100
    for ours, theirs in zip(streamed.logits, resident.logits, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
    with gate.open_session(tied_model) as session:
        opened = session._opened
        assert session.model_info.row_bytes == opened.file.experts.row_bytes == 0
        table = opened.file.tensors["token_embd.weight"]
        span = page_floor(table.offset), page_ceil(table.offset + table.nbytes)
        assert pages_of_file(opened.mappings[0], *span) == 0
