"""Synthetic Mixture-of-Experts models: random weights in a file that llama.cpp really runs.

Any shape, named ones for well-known models and tiny ones for tests. The file is streamed to disk
under a temporary name and takes its own name only when it is whole. The same seed gives the same
bytes with the same versions of numpy and llama.cpp.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import InputError
from engine.synth_data import tensor_data
from engine.synth_header import ALIGNMENT, header_bytes, model_metadata
from engine.synth_parse import check_shape, shape_from_text
from engine.synth_shapes import MAX_SHARDS, SHAPES, ModelShape
from engine.synth_tensors import TensorPlan, plan_tensors
from engine.synth_vocab import make_vocabulary

__all__ = ["SHAPES", "ModelShape", "planned_bytes", "shape_from_text", "write_model"]

Progress = Callable[[int, int], None]
"""Told the bytes written so far and the bytes there will be."""

FREE_SPACE_LEFT = 64 << 20
"""Bytes of the disk that writing a model leaves to everybody else."""
MAX_SEED = 2**32 - 1


@dataclass(frozen=True)
class _Part:
    """One file of the model, as it will be written."""

    path: Path
    header: bytes
    tensors: list[TensorPlan]

    @property
    def n_bytes(self) -> int:
        return len(self.header) + sum(_padded(plan.n_bytes) for plan in self.tensors)

    @property
    def unfinished(self) -> Path:
        return self.path.with_name(self.path.name + ".partial")


def planned_bytes(shape: ModelShape) -> int:
    """Bytes on disk of the whole model, headers and padding included, with the chat template.

    Raises InputError for a shape that cannot be built.
    """
    parts = _plan_parts(Path("model.gguf"), shape, 1, shape.shards, chat_template=True)
    return sum(part.n_bytes for part in parts)


def write_model(
    path: str | os.PathLike[str],
    shape: ModelShape,
    *,
    seed: int = 1,
    shards: int | None = None,
    chat_template: bool = True,
    force: bool = False,
    progress: Progress | None = None,
) -> list[Path]:
    """Write a model and return its files, the one to open first.

    With more than one shard, `name.gguf` becomes `name-00001-of-0000N.gguf` and so on; `shards`
    None takes the shape's own number. Nothing is left behind if writing fails or is interrupted.
    Raises InputError for an impossible shape, a file that exists (unless `force`), a folder that
    cannot be written, and too little space on the disk.
    """
    if not 0 <= seed <= MAX_SEED:
        raise InputError(f"seed {seed} is not allowed: it must be from 0 to {MAX_SEED}")
    if not Path(path).name:
        raise InputError(f"{str(path)!r} is a folder: give the name of a file")
    n_shards = shape.shards if shards is None else shards
    parts = _plan_parts(Path(path), shape, seed, n_shards, chat_template=chat_template)
    _check_target(parts, force=force)
    _check_space(parts)
    try:
        _write_parts(parts, seed, progress)
        _publish(parts)
    except OSError as error:
        raise _write_error(error, parts) from error
    finally:
        for part in parts:
            part.unfinished.unlink(missing_ok=True)
    return [part.path for part in parts]


def _plan_parts(
    path: Path, shape: ModelShape, seed: int, shards: int, *, chat_template: bool
) -> list[_Part]:
    check_shape(shape)
    tensors = plan_tensors(shape)
    most = min(MAX_SHARDS, len(tensors))
    if not 1 <= shards <= most:
        raise InputError(
            f"{shards} shards are not possible: {shape.name!r} has {len(tensors)} tensors, "
            f"so it must be from 1 to {most}"
        )
    vocabulary = make_vocabulary(shape.n_vocab, seed)
    metadata = model_metadata(shape, vocabulary, seed, chat_template=chat_template)
    parts = []
    for number, group in enumerate(_grouped(tensors, shards)):
        header = header_bytes(
            metadata, group, shard=number, shards=shards, n_all_tensors=len(tensors)
        )
        parts.append(_Part(_shard_path(path, number, shards), header, group))
    return parts


def _shard_path(path: Path, number: int, shards: int) -> Path:
    if shards == 1:
        return path
    stem = path.name.removesuffix(".gguf")
    return path.with_name(f"{stem}-{number + 1:05d}-of-{shards:05d}.gguf")


def _grouped(tensors: Sequence[TensorPlan], shards: int) -> list[list[TensorPlan]]:
    """The tensors in order, in groups of about equal bytes, none of them empty."""
    groups: list[list[TensorPlan]] = [[]]
    total, done = sum(plan.n_bytes for plan in tensors), 0
    for i, plan in enumerate(tensors):
        group_full = done * shards >= total * len(groups)
        rest_needed = len(tensors) - i == shards - len(groups)
        if groups[-1] and len(groups) < shards and (group_full or rest_needed):
            groups.append([])
        groups[-1].append(plan)
        done += plan.n_bytes
    return groups


def _check_target(parts: Sequence[_Part], *, force: bool) -> None:
    folder = parts[0].path.parent
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: create it, or choose another place")
    for part in parts:
        if part.path.is_dir():
            raise InputError(f"{part.path} is a folder: give the name of a file")
        if part.path.exists() and not force:
            raise InputError(f"{part.path} exists: choose another name, or replace it with --force")


def _check_space(parts: Sequence[_Part]) -> None:
    folder = parts[0].path.parent
    needed = sum(part.n_bytes for part in parts)
    free = shutil.disk_usage(folder).free
    missing = needed + FREE_SPACE_LEFT - free
    if missing > 0:
        raise InputError(
            f"{folder} has {_size(free)} free, but the model takes {_size(needed)} and "
            f"{_size(FREE_SPACE_LEFT)} must stay free: make room for {_size(missing)} more, "
            "choose another disk, or a smaller shape"
        )


def _write_parts(parts: Sequence[_Part], seed: int, progress: Progress | None) -> None:
    total, done = sum(part.n_bytes for part in parts), 0
    for part in parts:
        with part.unfinished.open("wb", buffering=0) as file:
            done += _write_all(file.fileno(), part.header)
            for plan in part.tensors:
                for chunk in tensor_data(plan, seed):
                    done += _write_all(file.fileno(), chunk.data)
                    if progress:
                        progress(done, total)
                padding = _padded(plan.n_bytes) - plan.n_bytes
                done += _write_all(file.fileno(), bytes(padding))
            os.fsync(file.fileno())
    if progress:
        progress(done, total)


def _publish(parts: Sequence[_Part]) -> None:
    # A model is opened by its first file, so that one is gone while others change under it, and
    # comes when they are all there. A single file is replaced in one step.
    first, *others = parts
    if others:
        first.path.unlink(missing_ok=True)
    for part in (*others, first):
        part.unfinished.replace(part.path)


def _write_all(fd: int, data: bytes | memoryview) -> int:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    return len(data)


def _write_error(error: OSError, parts: Sequence[_Part]) -> InputError:
    path = parts[0].path
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        needed = _size(sum(part.n_bytes for part in parts))
        return InputError(f"the disk of {path} filled up while writing {needed}; nothing was kept")
    return InputError(f"cannot write {path}: {error.strerror or error}; nothing was kept")


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def _size(n_bytes: int) -> str:
    if n_bytes < 10**9:
        return f"{n_bytes / 10**6:.1f} MB"
    return f"{n_bytes / 10**9:.1f} GB"
