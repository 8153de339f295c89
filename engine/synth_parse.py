"""From text to a shape that can be built, or to a sentence that says why it cannot.

Pure: nothing here touches llama.cpp or the disk.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator
from typing import Any, get_args, get_type_hints

from engine.errors import InputError
from engine.synth_shapes import (
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_SHARDS,
    QUANTS,
    SHAPES,
    SMALLEST_VOCAB,
    ModelShape,
)
from engine.synth_tensors import plan_tensors

LARGEST_SIZE = 1 << 20
"""No real model has a dimension above this; more is a slip of the finger."""

_HINTS = get_type_hints(ModelShape)
_KEYS = {
    field.name.replace("_", "-"): field.name
    for field in dataclasses.fields(ModelShape)
    if field.name not in ("name", "description")
}
_GATINGS = {
    "qwen3moe": ("softmax",),
    "qwen35moe": ("softmax",),
    "gpt-oss": ("softmax-after-topk",),
    "deepseek2": ("softmax", "sigmoid"),
    "qwen3": ("softmax",),
}


def shape_from_text(text: str) -> ModelShape:
    """A named shape, or one with changes: `tiny,n-layer=6,fused=true`.

    Raises InputError for an unknown name or key, a value of the wrong type, and a shape that
    cannot be built.
    """
    name, *changes = (part.strip() for part in text.split(","))
    if name not in SHAPES:
        raise InputError(f"no shape {name!r}{_nearest(name, SHAPES)} Shapes: {', '.join(SHAPES)}")
    values: dict[str, Any] = {}
    for change in changes:
        key, equals, value = (part.strip() for part in change.partition("="))
        if not equals:
            raise InputError(f"{change!r} in shape {text!r} is not a change: write key=value")
        if key not in _KEYS:
            raise InputError(f"no shape key {key!r}{_nearest(key, _KEYS)} Keys: {', '.join(_KEYS)}")
        values[_KEYS[key]] = _value(key, value)
    if not values:
        return SHAPES[name]
    shape = dataclasses.replace(SHAPES[name], name=",".join((name, *changes)), **values)
    check_shape(shape)
    return shape


def check_shape(shape: ModelShape) -> None:
    """Refuse a shape that llama.cpp would not load.

    Raises InputError with every reason found.
    """
    # Later checks divide by what earlier ones make sure of.
    for check in (_size_problems, _structure_problems, _row_problems):
        problems = list(check(shape))
        if problems:
            raise InputError(f"shape {shape.name!r} cannot be built: {'; '.join(problems)}")


def _size_problems(shape: ModelShape) -> Iterator[str]:
    hybrid = shape.arch == "qwen35moe"
    ranges = {
        "n-layer": (1, MAX_LAYERS),
        "n-embd": (32, LARGEST_SIZE),
        "n-head": (1, LARGEST_SIZE),
        "n-head-kv": (1, LARGEST_SIZE if shape.arch == "deepseek2" else shape.n_head),
        "head-dim": (2, LARGEST_SIZE),
        "n-vocab": (SMALLEST_VOCAB, LARGEST_SIZE),
        "n-ctx-train": (1, 1 << 30),
        "n-expert": (0, MAX_EXPERTS),
        "n-expert-used": (1 if shape.is_moe else 0, shape.n_expert),
        "expert-ff": (1 if shape.is_moe else 0, LARGEST_SIZE),
        "n-leading-dense": (0, shape.n_layer - 1),
        "n-ff-dense": (0, LARGEST_SIZE),
        "n-shared-expert": (0, 64),
        "rope-dim": (0, shape.head_dim),
        # llama.cpp aborts on a hybrid model without recurrent layers.
        "attention-every": (2, max(2, shape.n_layer)) if hybrid else (1, 1),
        "kv-lora-rank": (0, LARGEST_SIZE),
        "n-state-head": (0, LARGEST_SIZE),
        "sliding-window": (0, 1 << 30),
        "shards": (1, MAX_SHARDS),
    }
    for key, (low, high) in ranges.items():
        value = getattr(shape, _KEYS[key])
        if not low <= value <= high:
            allowed = f"from {low} to {high}" if low < high else f"{low} with {shape.arch}"
            yield f"{key} is {value}, it must be {allowed}"
    if not 0.0 < shape.expert_scale <= 100.0:
        yield f"expert-scale is {shape.expert_scale:g}, it must be above 0 and at most 100"


def _structure_problems(shape: ModelShape) -> Iterator[str]:
    arch = shape.arch
    if shape.is_moe == (arch == "qwen3"):
        yield "qwen3 has no experts (n-expert=0), every other arch has some"
    if shape.n_head % shape.n_head_kv and arch != "deepseek2":
        yield f"n-head ({shape.n_head}) is not a multiple of n-head-kv ({shape.n_head_kv})"
    if shape.rope % 2:
        yield f"the rotated part of a head must be even, not {shape.rope}"
    if shape.gating not in _GATINGS[arch]:
        yield f"{arch} has {' or '.join(_GATINGS[arch])} gating, not {shape.gating}"
    if shape.biased != (arch == "gpt-oss"):
        yield "biased=true goes with gpt-oss, and only with it"
    deepseek, hybrid = arch == "deepseek2", arch == "qwen35moe"
    only = {
        "n-leading-dense": (deepseek, "deepseek2"),
        "selection-bias": (deepseek, "deepseek2"),
        "kv-lora-rank": (deepseek, "deepseek2"),
        "fused": (deepseek or hybrid, "deepseek2 or qwen35moe"),
        "n-shared-expert": (deepseek or hybrid, "deepseek2 or qwen35moe"),
        "rope-dim": (deepseek or hybrid, "deepseek2 or qwen35moe"),
        "n-state-head": (hybrid, "qwen35moe"),
        "sliding-window": (arch == "gpt-oss", "gpt-oss"),
    }
    for key, (fits, archs) in only.items():
        if getattr(shape, _KEYS[key]) and not fits:
            yield f"{key} needs arch {archs}, not {arch}"
    if shape.expert_scale != 1.0 and not deepseek:
        yield f"expert-scale needs arch deepseek2, not {arch}"
    yield from _missing_parts(shape)


def _missing_parts(shape: ModelShape) -> Iterator[str]:
    needed = {
        "deepseek2": ("n-shared-expert", "kv-lora-rank", "rope-dim"),
        "qwen35moe": ("n-shared-expert", "n-state-head", "rope-dim"),
        "gpt-oss": ("sliding-window",),
    }
    for key in needed.get(shape.arch, ()):
        if not getattr(shape, _KEYS[key]):
            yield f"{shape.arch} needs {key} above 0"
    if (shape.n_leading_dense or not shape.is_moe) and not shape.n_ff_dense:
        yield "layers without experts need n-ff-dense above 0"
    if shape.arch == "deepseek2" and shape.rope >= shape.head_dim:
        yield "deepseek2 needs rope-dim below head-dim"
    if shape.arch == "qwen35moe":
        if shape.n_state_head % 2 or shape.head_dim % 2:
            yield "qwen35moe needs an even n-state-head and an even head-dim"
        if shape.attention_every > shape.n_layer:
            yield "qwen35moe needs at least attention-every layers"


def _row_problems(shape: ModelShape) -> Iterator[str]:
    seen = set()
    for plan in plan_tensors(shape):
        block = QUANTS[plan.quant].block
        kind = (plan.quant, plan.ne[0], plan.quant_key)
        if plan.ne[0] % block and kind not in seen:
            seen.add(kind)
            remedy = f", or choose another {plan.quant_key}" if plan.quant_key else ""
            yield (
                f"{plan.name} has rows of {plan.ne[0]} elements, but {plan.quant} needs a "
                f"multiple of {block}: change the size{remedy}"
            )


def _value(key: str, text: str) -> Any:
    hint = _HINTS[_KEYS[key]]
    if hint is bool:
        if text not in ("true", "false"):
            raise InputError(f"{key}={text} is not allowed: {key} is true or false")
        return text == "true"
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            noun = "a whole number" if hint is int else "a number"
            raise InputError(f"{key}={text} is not allowed: {key} is {noun}") from None
    choices = list(_choices(hint))
    if text not in choices:
        allowed = ", ".join(choice for choice in choices if choice)
        raise InputError(f"{key}={text} is not allowed: {key} is one of {allowed}")
    return text


def _choices(hint: Any) -> Iterator[str]:
    for arg in get_args(hint):
        if isinstance(arg, str):
            yield arg
        else:
            yield from _choices(arg)


def _nearest(word: str, words: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(words), n=1)
    return f"; did you mean {near[0]!r}?" if near else "."
