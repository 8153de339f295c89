"""What a GGUF's header must say so that native code may see it.

llama.cpp checks some of its header with assertions, which end the process without a message that a
person can use. What a damaged or hand-made file can trip over is checked here first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.errors import ModelError

LARGEST_LAYER_COUNT = 512
"""llama.cpp's LLAMA_MAX_LAYERS; its tables are that long."""

_COUNTS = {
    "block_count": LARGEST_LAYER_COUNT,
    "expert_count": 1 << 16,
    "expert_used_count": 1 << 16,
    "expert_feed_forward_length": 1 << 32,
    "nextn_predict_layers": LARGEST_LAYER_COUNT,
    "context_length": 1 << 32,
    "embedding_length": 1 << 32,
    "attention.head_count": 1 << 32,
    "attention.head_count_kv": 1 << 32,
    "attention.key_length": 1 << 32,
    "attention.value_length": 1 << 32,
    "attention.kv_lora_rank": 1 << 32,
    "rope.dimension_count": 1 << 32,
}
"""Counts that the engine or llama.cpp computes with, and the largest that can be meant."""

_MANY = ("attention.", "expert_", "rope.")
"""Beginnings of the counts that some architectures give layer by layer."""

_POSITIVE = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
_NEVER_WEIGHTS = ("i8", "i16", "i32", "i64", "f64")
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
_ALIGNMENT = 32
"""What ggml demands of every tensor's address; a mapped file has it only if the header keeps it."""


def check_metadata(path: Path, arch: str, metadata: Mapping[str, Any]) -> None:
    """Raise ModelError for a value that cannot be, named with its key."""
    for name, limit in _COUNTS.items():
        key = f"{arch}.{name}"
        if key in metadata:
            _check_count(path, key, metadata[key], limit, many=name.startswith(_MANY))
    _check_experts(path, arch, metadata)
    for name in _POSITIVE:
        value = metadata.get(f"{arch}.{name}", 0.0)
        if not (isinstance(value, float) and math.isfinite(value) and value >= 0):
            raise _wrong(path, f"{arch}.{name}", value, "a number of 0 or more")
    scaling = metadata.get(f"{arch}.rope.scaling.type", "none")
    if scaling not in _ROPE_SCALINGS:
        expected = "one of " + ", ".join(_ROPE_SCALINGS)
        raise _wrong(path, f"{arch}.rope.scaling.type", scaling, expected)
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not _is_count(alignment) or alignment % _ALIGNMENT:
        raise _wrong(path, "general.alignment", alignment, f"a multiple of {_ALIGNMENT}")


def check_tensor_type(path: Path, name: str, type_name: str) -> None:
    """Raise ModelError for a norm or a router of whole numbers, which llama.cpp takes unchecked."""
    if name.endswith(("norm.weight", "ffn_gate_inp.weight")) and type_name in _NEVER_WEIGHTS:
        raise ModelError(
            f"{path}: its header says that {name} is of type {type_name}, which no weight has; "
            "the file is damaged: download or copy it again"
        )


def check_parts(paths: Sequence[Path], headers: Sequence[Mapping[str, Any]]) -> None:
    """Raise ModelError unless these files' headers say that they are one model's parts, in order.

    `headers` are the metadata of each file.
    """
    told = headers[0].get("split.count", 1)
    if not _is_count(told) or told > 99999:
        raise _wrong(paths[0], "split.count", told, "a whole number from 0 to 99999")
    told = max(told, 1)
    if told != len(paths):
        raise ModelError(
            f"{paths[0]}: the file says that it is one of {told} parts, but its name does not "
            f"end in -00001-of-{told:05d}.gguf; give the parts their original names back"
        )
    if told == 1:
        return
    for place, (path, metadata) in enumerate(zip(paths, headers, strict=True)):
        if (metadata.get("split.no"), metadata.get("split.count")) != (place, told):
            raise ModelError(
                f"{path}: is not part {place + 1} of {told} by its header "
                f"(split.no = {metadata.get('split.no')!r}, counted from 0; "
                f"split.count = {metadata.get('split.count')!r}); "
                "parts of another model, or files that were renamed"
            )


def check_tensor_count(path: Path, metadata: Mapping[str, Any], n_tensors: int) -> None:
    """Raise ModelError if the parts do not hold as many tensors as the first part promises."""
    told = metadata.get("split.tensors.count")
    if told is not None and metadata.get("split.count", 1) > 1 and told != n_tensors:
        raise ModelError(
            f"{path}: the model has {told} tensors by its header, and its parts hold {n_tensors} "
            "different ones; a part belongs to another model"
        )


def largest(value: Any) -> int:
    """A checked count, or the largest of those that are given layer by layer; None is 0."""
    return int(max(value)) if isinstance(value, list) else int(value or 0)


def _check_experts(path: Path, arch: str, metadata: Mapping[str, Any]) -> None:
    n_expert = largest(metadata.get(f"{arch}.expert_count", 0))
    if not n_expert:
        return
    used = metadata.get(f"{arch}.expert_used_count", 0)
    if not 0 < largest(used) <= n_expert:
        raise _wrong(
            path, f"{arch}.expert_used_count", used, f"a whole number from 1 to {n_expert}"
        )


def _check_count(path: Path, key: str, value: Any, limit: int, *, many: bool) -> None:
    values = value if many and isinstance(value, list) else [value]
    if not (values and all(_is_count(one) and one <= limit for one in values)):
        raise _wrong(path, key, value, f"a whole number from 0 to {limit}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _wrong(path: Path, key: str, value: Any, expected: str) -> ModelError:
    shown = repr(value)
    if len(shown) > 60:
        shown = shown[:60] + "…"
    return ModelError(
        f"{path}: its header says {key} = {shown}, where {expected} belongs; "
        "the file is damaged: download or copy it again"
    )
