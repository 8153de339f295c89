"""What a route trace must fulfil so that no figure derived from it is wrong.

Rows stand in the order in which the engine loaded: turns ascend; in a turn prefill comes before
decode; decode ascends by step, layer, slot; prefill goes batch by batch, in a batch by layer, in a
layer by step and slot. A batch ends where the layer number falls, so consecutive prefill batches
of a model with a single MoE layer count as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.errors import InputError
from engine.trace_table import IntArray, TraceTable, pairs

BoolArray = npt.NDArray[np.bool_]

IDENTITY = ("turn", "phase", "step", "layer", "slot")
"""The columns that together name a row."""

LIMITS = {"n_layer": 1024, "n_expert": 16384, "n_expert_used": 16384, "expert_bytes": 1 << 50}
"""The largest values a preamble may give: far above any model, and what a replay has memory for."""


def required_number(path: Path, key: str, value: str | None, line: int) -> int:
    """A whole number from 1 to the key's limit that the preamble must have."""
    if value is None:
        raise InputError(f"{path}: the preamble does not say {key}=<number>")
    limit = LIMITS[key]
    if not (_is_whole(value) and 1 <= int(value) <= limit):
        raise InputError(
            f"{path}, line {line}: {key}={value}; allowed is a whole number from 1 to {limit}"
        )
    return int(value)


def layer_sizes(table: TraceTable, n_layer: int) -> tuple[dict[int, int], dict[int, int]]:
    """Bytes of one expert and of the dense weights, by layer, from the preamble's layer lines."""
    expert_bytes: dict[int, int] = {}
    dense_bytes: dict[int, int] = {}
    seen: dict[int, int] = {}
    for number, line in enumerate(table.preamble, start=1):
        found = pairs(line)
        if "layer" not in found:
            continue
        text = found["layer"]
        if not (_is_whole(text) and int(text) < n_layer):
            raise InputError(
                f"{table.path}, line {number}: layer={text}; allowed is 0 to {n_layer - 1}"
            )
        layer = int(text)
        if layer in seen:
            raise InputError(
                f"{table.path}, line {number}: layer {layer} was described in line {seen[layer]}"
            )
        seen[layer] = number
        if "expert_bytes" in found:
            size = required_number(table.path, "expert_bytes", found["expert_bytes"], number)
            expert_bytes[layer] = size
        if _is_whole(found.get("dense_bytes", "")):
            dense_bytes[layer] = int(found["dense_bytes"])
    return expert_bytes, dense_bytes


def check_routings(
    table: TraceTable, columns: Mapping[str, IntArray], expert_bytes: Mapping[int, int]
) -> None:
    """Refuse rows out of order, repeated or missing, and layers of unknown size."""
    _check_sizes(table, columns["layer"], expert_bytes)
    _check_order(table, columns)
    _check_slots(table, columns)


def load_calls(columns: Mapping[str, IntArray]) -> IntArray:
    """Which load call each row belongs to, counted from 0; for rows in order."""
    return _numbered(_block_starts(columns) | _changes(columns["layer"]))


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 16


def _check_sizes(table: TraceTable, layer: IntArray, expert_bytes: Mapping[int, int]) -> None:
    missing = ~np.isin(layer, list(expert_bytes))
    if missing.any():
        row = int(np.argmax(missing))
        raise table.error(
            row,
            f"layer {layer[row]} is used, but the preamble does not say its expert_bytes: "
            "a layer that costs nothing would fake every figure. "
            f"Add '# layer={layer[row]} expert_bytes=<bytes of one expert>' above the header",
        )


def _check_order(table: TraceTable, columns: Mapping[str, IntArray]) -> None:
    turn, phase, step = columns["turn"], columns["phase"], columns["step"]
    layer, slot = columns["layer"], columns["slot"]
    same_turn = ~_changes(turn)
    back = _falls(turn) | (same_turn & _falls(phase))
    block = _block_starts(columns)
    # Inside a block the order is by layer, step, slot; in decode a block has one step.
    back |= ~block & _falls(layer)
    same_layer = ~block & ~_changes(layer)
    back |= same_layer & _falls(step)
    back |= same_layer & ~_changes(step) & ~_rises(slot)
    back |= _reaches_back(block, same_turn, step)
    if back.any():
        row = int(np.argmax(back))
        raise table.error(row, _order_message(table, columns, row))


def _reaches_back(block: BoolArray, same_turn: BoolArray, step: IntArray) -> BoolArray:
    """Rows whose step an earlier block of the same turn has already reached."""
    starts = np.flatnonzero(block)
    highest = np.maximum.reduceat(step, starts)
    before = np.full(len(starts), -1, dtype=np.int64)
    before[1:] = np.where(same_turn[starts[1:]], highest[:-1], -1)
    reached: BoolArray = step <= before[_numbered(block)]
    return reached


def _order_message(table: TraceTable, columns: Mapping[str, IntArray], row: int) -> str:
    here = [int(columns[name][row]) for name in IDENTITY]
    name = ", ".join(f"{key} {value}" for key, value in zip(IDENTITY, here, strict=True))
    equal = np.ones(row, dtype=np.bool_)
    for key, value in zip(IDENTITY, here, strict=True):
        equal &= columns[key][:row] == value
    if equal.any():
        return f"{name} was already in line {table.first_line + int(np.argmax(equal))}"
    return (
        f"{name} is out of order. Rows go by turn, prefill before decode, then by step, layer and "
        "slot; in prefill by batch, layer, step and slot"
    )


def _check_slots(table: TraceTable, columns: Mapping[str, IntArray]) -> None:
    slot = columns["slot"]
    new = _changes(columns["step"]) | _changes(columns["layer"]) | _changes(columns["phase"])
    new |= _changes(columns["turn"])
    expected = np.where(new, 0, np.concatenate([[0], slot[:-1] + 1]))
    if (slot != expected).any():
        row = int(np.argmax(slot != expected))
        raise table.error(
            row, f"slot is {slot[row]} where {expected[row]} is due: a row before it is missing"
        )
    sizes = np.diff(np.append(np.flatnonzero(new), len(slot)))
    if len(sizes) > 2 and np.all(sizes[:-1] == sizes[0]) and sizes[-1] < sizes[0]:
        raise table.error(
            len(slot) - 1,
            f"the last routing has {sizes[-1]} rows, every other one {sizes[0]}: the recording "
            f"was cut off. Delete the last {sizes[-1]} lines to use the rest",
        )


def _block_starts(columns: Mapping[str, IntArray]) -> BoolArray:
    """Where a decoded token or a prefill batch begins."""
    decode = columns["phase"] == 1
    within = np.where(decode, _changes(columns["step"]), _falls(columns["layer"]))
    return _changes(columns["turn"]) | _changes(columns["phase"]) | within


def _numbered(starts: BoolArray) -> IntArray:
    return np.cumsum(starts, dtype=np.int64) - 1


def _changes(values: IntArray) -> BoolArray:
    """Where a value differs from the row before; the first row does."""
    return np.concatenate([[True], values[1:] != values[:-1]])


def _rises(values: IntArray) -> BoolArray:
    return np.concatenate([[True], values[1:] > values[:-1]])


def _falls(values: IntArray) -> BoolArray:
    return np.concatenate([[False], values[1:] < values[:-1]])


def check_reads(table: TraceTable, columns: dict[str, IntArray]) -> None:
    """Raise InputError for a routing that was dropped and read."""
    if "dropped" not in columns or "expert_bytes" not in columns:
        return
    bad = (columns["dropped"] == 1) & (columns["expert_bytes"] > 0)
    if bad.any():
        row = int(np.argmax(bad))
        size = columns["expert_bytes"][row]
        raise table.error(row, f"the routing was dropped, yet {size} bytes were read for it")
