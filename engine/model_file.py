"""What a GGUF file says of itself, before anything is loaded: metadata, tensors, experts.

Reads headers with llama.cpp's own gguf C API (17 ms for a vocabulary of 152 000 words), checks
them against the files' real sizes, and resolves every tensor of a split model to its shard.
"""

from __future__ import annotations

import ctypes
import os
import re
import stat
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from engine import ggml
from engine.errors import ModelError
from engine.header_checks import (
    check_metadata,
    check_parts,
    check_tensor_count,
    check_tensor_type,
    largest,
)

GGUF_MAGIC = b"GGUF"
SHARD_NAME = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
_NAMED_PARTS = 20
_LAYER_OF_NAME = re.compile(r"^blk\.(\d+)\.")


class _GgufInitParams(ctypes.Structure):
    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


_ptr, _i64, _text = ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p
_open = ggml.declare(ggml.base, "gguf_init_from_file", _ptr, _text, _GgufInitParams)
_close = ggml.declare(ggml.base, "gguf_free", None, _ptr)
_data_offset = ggml.declare(ggml.base, "gguf_get_data_offset", ctypes.c_size_t, _ptr)
_find_key = ggml.declare(ggml.base, "gguf_find_key", _i64, _ptr, _text)
_n_kv = ggml.declare(ggml.base, "gguf_get_n_kv", _i64, _ptr)
_key_name = ggml.declare(ggml.base, "gguf_get_key", _text, _ptr, _i64)
_kv_type = ggml.declare(ggml.base, "gguf_get_kv_type", ctypes.c_int, _ptr, _i64)
_array_type = ggml.declare(ggml.base, "gguf_get_arr_type", ctypes.c_int, _ptr, _i64)
_array_length = ggml.declare(ggml.base, "gguf_get_arr_n", ctypes.c_size_t, _ptr, _i64)
_array_data = ggml.declare(ggml.base, "gguf_get_arr_data", _ptr, _ptr, _i64)
_n_tensors = ggml.declare(ggml.base, "gguf_get_n_tensors", _i64, _ptr)
_tensor_name = ggml.declare(ggml.base, "gguf_get_tensor_name", _text, _ptr, _i64)
_tensor_offset = ggml.declare(ggml.base, "gguf_get_tensor_offset", ctypes.c_size_t, _ptr, _i64)
_tensor_size = ggml.declare(ggml.base, "gguf_get_tensor_size", ctypes.c_size_t, _ptr, _i64)
_tensor_type = ggml.declare(ggml.base, "gguf_get_tensor_type", ctypes.c_int, _ptr, _i64)
_tensor_ne = ggml.declare(
    ggml.base, "gguf_get_tensor_ne", ctypes.POINTER(ctypes.c_int64), _ptr, _i64
)

# enum gguf_type in gguf.h: the scalar types by their number, with accessor suffix and C type.
_SCALARS: dict[int, tuple[str, Any]] = {
    0: ("u8", ctypes.c_uint8),
    1: ("i8", ctypes.c_int8),
    2: ("u16", ctypes.c_uint16),
    3: ("i16", ctypes.c_int16),
    4: ("u32", ctypes.c_uint32),
    5: ("i32", ctypes.c_int32),
    6: ("f32", ctypes.c_float),
    7: ("bool", ctypes.c_bool),
    8: ("str", ctypes.c_char_p),
    10: ("u64", ctypes.c_uint64),
    11: ("i64", ctypes.c_int64),
    12: ("f64", ctypes.c_double),
}
_STRING, _ARRAY = 8, 9
_GETTERS = {
    number: ggml.declare(ggml.base, f"gguf_get_val_{suffix}", c_type, _ptr, _i64)
    for number, (suffix, c_type) in _SCALARS.items()
}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor as the header describes it."""

    name: str
    shard: int
    offset: int
    """Absolute position in its shard, in bytes."""
    nbytes: int
    type_name: str
    shape: tuple[int, ...]
    """Elements per dimension, fastest first, as ggml counts them."""

    @property
    def layer(self) -> int | None:
        """The block the tensor belongs to, by its name."""
        match = _LAYER_OF_NAME.match(self.name)
        return int(match[1]) if match else None


@dataclass(frozen=True)
class ExpertLayout:
    """Where the bytes of a model are, as far as the header tells; empty for a dense model."""

    n_layer: int
    n_expert: int
    n_expert_used: int
    entry_bytes: dict[int, int]
    """Bytes of one expert, over all its projections, by layer."""
    dense_bytes: int
    row_bytes: int
    """Of dense_bytes, tables of which a token reads one row: they can stay in the file."""

    @property
    def token_demand_bytes(self) -> int:
        """Expert bytes that one token routes to."""
        return sum(self.entry_bytes.values()) * self.n_expert_used

    @property
    def layer_demand_bytes(self) -> int:
        """Expert bytes that one token routes to in the widest layer."""
        return max(self.entry_bytes.values(), default=0) * self.n_expert_used

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts."""
        return sum(self.entry_bytes.values()) * self.n_expert


@dataclass(frozen=True)
class ModelFile:
    """A GGUF, or all parts of a split one."""

    paths: list[Path]
    sizes: list[int]
    data_offsets: list[int]
    """Where each shard's tensor data begins, in bytes: all before is header."""
    metadata: dict[str, Any]
    """Scalars and numeric arrays of the first part; text arrays (the vocabulary) are left out."""
    tensors: dict[str, TensorEntry]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> ModelFile:
        """Read and check the header of `path`, and of its sibling parts if it is split.

        Raises ModelError for anything that is not a whole, readable GGUF.
        """
        first = Path(path).expanduser()
        _check_readable(first)
        paths = _shards_of(first)
        headers = [_read_header(part) for part in paths]
        metadata = headers[0].metadata
        check_parts(paths, [header.metadata for header in headers])
        check_metadata(paths[0], str(metadata.get("general.architecture", "unknown")), metadata)
        tensors: dict[str, TensorEntry] = {}
        for shard, header in enumerate(headers):
            for name, (offset, size, kind, shape) in header.tensors.items():
                check_tensor_type(paths[shard], name, kind)
                tensors[name] = TensorEntry(name, shard, offset, size, kind, shape)
        check_tensor_count(paths[0], metadata, len(tensors))
        return cls(
            paths,
            [part.stat().st_size for part in paths],
            [header.data_offset for header in headers],
            metadata,
            tensors,
        )

    @property
    def arch(self) -> str:
        """The architecture's name, as llama.cpp knows it."""
        return str(self.metadata.get("general.architecture", "unknown"))

    @property
    def name(self) -> str:
        """What the model calls itself, else the file's name."""
        return str(self.metadata.get("general.name") or self.paths[0].stem)

    def arch_value(self, key: str, default: Any = None) -> Any:
        """A metadata value of this architecture: `block_count`, `expert_count`, …"""
        return self.metadata.get(f"{self.arch}.{key}", default)

    @cached_property
    def experts(self) -> ExpertLayout:
        """Which bytes are experts: tensors of three dimensions with one matrix per expert.

        The graph has the last word (it decides what is streamed); this is for planning before
        anything is loaded. Layers that llama.cpp loads but a token does not visit (next-token
        prediction heads) are left out.
        """
        n_expert = largest(self.arch_value("expert_count", 0))
        n_layer = largest(self.arch_value("block_count", 0))
        visited = n_layer - largest(self.arch_value("nextn_predict_layers", 0))
        entry_bytes: dict[int, int] = {}
        expert_total = 0
        for tensor in self.tensors.values():
            if n_expert > 1 and len(tensor.shape) == 3 and tensor.shape[2] == n_expert:
                expert_total += tensor.nbytes
                layer = tensor.layer
                if layer is not None and layer < visited:
                    entry_bytes[layer] = entry_bytes.get(layer, 0) + tensor.nbytes // n_expert
        total = sum(tensor.nbytes for tensor in self.tensors.values())
        return ExpertLayout(
            n_layer,
            n_expert if entry_bytes else 0,
            largest(self.arch_value("expert_used_count", 0)) if entry_bytes else 0,
            dict(sorted(entry_bytes.items())),
            total - expert_total,
            self._row_bytes(),
        )

    def _row_bytes(self) -> int:
        tied = "output.weight" not in self.tensors
        names = ([] if tied else ["token_embd.weight"]) + ["per_layer_token_embd.weight"]
        return sum(self.tensors[name].nbytes for name in names if name in self.tensors)


@dataclass(frozen=True)
class _Header:
    data_offset: int
    metadata: dict[str, Any]
    tensors: dict[str, tuple[int, int, str, tuple[int, ...]]]


def _check_readable(path: Path) -> None:
    try:
        status = path.stat()
    except FileNotFoundError:
        raise ModelError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    if stat.S_ISDIR(status.st_mode):
        raise ModelError(f"{path}: is a directory; give the .gguf file in it")
    if not stat.S_ISREG(status.st_mode):
        # A pipe would wait for its writer, a device may never end, and neither can be mapped.
        raise ModelError(f"{path}: is not a regular file, so it cannot be a model")
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    if not magic:
        raise ModelError(f"{path}: is an empty file; copy or download the model again")
    if magic != GGUF_MAGIC:
        raise ModelError(
            f"{path}: is not a GGUF file (it begins with {magic!r}, not {GGUF_MAGIC!r}). "
            "Models in other formats must be converted first"
        )


def _shards_of(path: Path) -> list[Path]:
    match = SHARD_NAME.match(path.name)
    if not match:
        return [path]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count:
        raise ModelError(f"{path}: its name says part {match['number']} of {match['count']}")
    paths = [
        path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf")
        for number in range(1, count + 1)
    ]
    missing = [part.name for part in paths if not part.exists()]
    if missing:
        raise ModelError(
            f"{path}: part of a model in {count} files, of which "
            f"{len(missing)} {'is' if len(missing) == 1 else 'are'} missing beside it: "
            + ", ".join(missing[:_NAMED_PARTS])
            + (", …" if len(missing) > _NAMED_PARTS else "")
        )
    for part in paths:
        _check_readable(part)
    return paths


def _read_header(path: Path) -> _Header:
    # A directory entry may name bytes that no console can show; C wants the raw name.
    context = _open(os.fsencode(path), _GgufInitParams(True, None))
    if not context:
        raise ModelError(
            f"{path}: the GGUF header is damaged or cut short; download or copy the file again"
        )
    try:
        header = _Header(_data_offset(context), _read_metadata(context), _read_tensors(context))
    finally:
        _close(context)
    size = path.stat().st_size
    end = max((offset + nbytes for offset, nbytes, _, _ in header.tensors.values()), default=0)
    if end > size:
        raise ModelError(
            f"{path}: is cut short: its header promises {end} bytes and it has {size} "
            f"({end - size} are missing); download or copy the file again"
        )
    return header


def _read_metadata(context: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for number in range(_n_kv(context)):
        key = _key_name(context, number).decode(errors="replace")
        kind = _kv_type(context, number)
        if kind == _ARRAY:
            element = _array_type(context, number)
            if element not in (_STRING, _ARRAY):
                c_type = _SCALARS[element][1]
                length = _array_length(context, number)
                pointer = ctypes.cast(_array_data(context, number), ctypes.POINTER(c_type))
                values[key] = pointer[:length]
            continue
        value = _GETTERS[kind](context, number)
        values[key] = value.decode(errors="replace") if isinstance(value, bytes) else value
    return values


def _read_tensors(context: int) -> dict[str, tuple[int, int, str, tuple[int, ...]]]:
    start = _data_offset(context)
    tensors = {}
    for number in range(_n_tensors(context)):
        ne = _tensor_ne(context, number)[:4]
        while len(ne) > 1 and ne[-1] == 1:
            ne.pop()
        tensors[_tensor_name(context, number).decode(errors="replace")] = (
            start + _tensor_offset(context, number),
            _tensor_size(context, number),
            ggml.type_name(_tensor_type(context, number)).decode(),
            tuple(ne),
        )
    return tensors
