"""Traces: what the router asked for (`route_trace v1`) and what was read for it (`io_trace v1`).

Owns both file formats, reading and writing. Readers go by column name; a column that is missing
reads as None, never as 0, and unknown columns and preamble keys are kept. What a file must fulfil
to be read at all is in `engine.trace_checks`. Writers buffer rows as numbers (64 bytes each) and
format them between tokens, so that a layer's callback pays a few microseconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import numpy as np
import numpy.typing as npt

from engine.errors import InputError, TuiworkError
from engine.trace_checks import (
    check_reads,
    check_routings,
    layer_sizes,
    load_calls,
    required_number,
)
from engine.trace_table import FloatArray, IntArray, TextArray, TraceTable, pairs, read_table

PREFILL, DECODE = 0, 1
"""Values of a row's `phase`."""

MISS, HIT, PREFETCHED = 0, 1, 2
"""Values of a row's `residency`; PREFETCHED is the first touch of a prefetched expert."""

NOT_SUBSTITUTED = -1
"""Value of a row's `substituted` where the routed expert itself ran, or was dropped."""

NECESSARY = ("turn", "phase", "step", "layer", "slot", "expert")
ROUTE_COLUMNS = (*NECESSARY, "weight", "residency", "expert_bytes", "dropped", "substituted")
IO_COLUMNS = (
    *("turn", "phase", "step", "layer", "expert", "projection", "lane", "speculative"),
    *("offset", "bytes_wanted", "bytes_read", "latency_us"),
)

WRITE_ROWS = 1 << 16
"""Rows a writer buffers at most across tokens: 4 MiB, about 170 tokens of a 48-layer model."""

LARGEST = (1 << 53) - 1
"""The largest whole number a trace may hold: above it a float is no longer exact."""

_SPLITTING = re.compile(r"[\x00-\x20\x7f,]+")
_ROW = np.dtype([(name, "f4" if name == "weight" else "i8") for name in ROUTE_COLUMNS])
# Nine digits bring a float32 back exactly, so a replay decides as the engine did.
_ROUTE_LINE = "%d,%d,%d,%d,%d,%d,%.9g,%d,%d,%d,%d\n"


@dataclass(frozen=True)
class TraceModel:
    """The model a trace is about, as its preamble tells."""

    name: str
    arch: str
    n_layer: int
    n_expert: int
    n_expert_used: int
    expert_bytes: Mapping[int, int]
    """Bytes of one expert, all projections, by MoE layer."""
    dense_bytes: Mapping[int, int] = field(default_factory=dict)
    """Bytes of a layer's always-needed weights, by MoE layer, where known."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """Preamble keys this reader has no use for."""

    @property
    def token_demand(self) -> int:
        """Bytes of the experts that one token routes, over all MoE layers."""
        return self.n_expert_used * sum(self.expert_bytes.values())

    @property
    def layer_demand(self) -> int:
        """Bytes of the experts that one token routes in the widest layer."""
        return self.n_expert_used * max(self.expert_bytes.values(), default=0)

    @property
    def all_experts(self) -> int:
        """Bytes of every expert of every MoE layer."""
        return self.n_expert * sum(self.expert_bytes.values())


@dataclass(frozen=True)
class RouteTrace:
    """Every routed expert of a run, one entry per row in each array, in the file's order."""

    path: Path
    first_line: int
    """The line of the first row in the file."""
    model: TraceModel
    turn: IntArray
    phase: IntArray
    step: IntArray
    layer: IntArray
    slot: IntArray
    expert: IntArray
    call: IntArray
    """Which load call a row belongs to, counted from 0: a decoded token's layer, or a prefill
    batch's layer with all its tokens."""
    weight: FloatArray | None
    """`nan` where the graph shows none."""
    residency: IntArray | None
    expert_bytes: IntArray | None
    """Bytes that this routing read."""
    dropped: IntArray | None
    substituted: IntArray | None
    """The expert that ran in the routed one's place; NOT_SUBSTITUTED: none did."""
    extra: Mapping[str, TextArray]
    """Unknown columns, as the file has them."""

    def __len__(self) -> int:
        return len(self.turn)

    @property
    def decode(self) -> npt.NDArray[np.bool_]:
        """Which rows belong to decoded tokens."""
        decoded: npt.NDArray[np.bool_] = self.phase == DECODE
        return decoded

    def line(self, row: int) -> int:
        """The line of a row in the file."""
        return self.first_line + row


def read_route_trace(path: Path) -> RouteTrace:
    """A route trace, from any engine that writes the format.

    Raises InputError, with file and line, for whatever would make a figure derived from it wrong.
    """
    table = read_table(path, "route_trace")
    table.require(NECESSARY)
    known = [name for name in ROUTE_COLUMNS if name in table.header]
    numbers = table.numbers(known)
    model = _read_model(table)
    high = {
        "phase": DECODE,
        "layer": model.n_layer - 1,
        "slot": model.n_expert - 1,
        "expert": model.n_expert - 1,
        "residency": PREFETCHED,
        "dropped": 1,
        "substituted": model.n_expert - 1,
    }
    low = {"substituted": NOT_SUBSTITUTED}
    columns = {
        name: table.whole(name, numbers[name], low.get(name, 0), high.get(name, LARGEST))
        for name in known
        if name != "weight"
    }
    necessary = {name: columns[name] for name in NECESSARY}
    check_routings(table, necessary, model.expert_bytes)
    check_reads(table, columns)
    return RouteTrace(
        path=path,
        first_line=table.first_line,
        model=model,
        **necessary,
        call=load_calls(necessary),
        weight=_weights(table, numbers.get("weight")),
        residency=columns.get("residency"),
        expert_bytes=columns.get("expert_bytes"),
        dropped=columns.get("dropped"),
        substituted=columns.get("substituted"),
        extra={name: table.texts(name) for name in table.header if name not in ROUTE_COLUMNS},
    )


def read_io_trace(path: Path) -> dict[str, IntArray | TextArray]:
    """The columns of an io trace by name, whichever it has; unknown ones as texts.

    Raises InputError, with file and line, for a value that cannot be.
    """
    table = read_table(path, "io_trace")
    known = [name for name in IO_COLUMNS if name in table.header and name != "projection"]
    if not known:
        raise InputError(
            f"{path}, line {table.first_line - 1}: no known column; "
            f"an io trace has {', '.join(IO_COLUMNS)}"
        )
    high = {"phase": DECODE, "speculative": 1}
    columns: dict[str, IntArray | TextArray] = {
        name: table.whole(name, values, 0, high.get(name, LARGEST))
        for name, values in table.numbers(known).items()
    }
    return {name: columns[name] if name in columns else table.texts(name) for name in table.header}


class _TraceFile:
    """A trace being written: opened with its preamble, so that a bad path fails before the run."""

    def __init__(self, path: Path, kind: str, model: TraceModel, columns: Sequence[str]) -> None:
        self._path = path
        try:
            # Open from the run's start to its end, so no with block can hold it.
            # A file's name may hold bytes that are no text; the trace shows them escaped.
            self._file: TextIO = open(  # noqa: SIM115
                path, "w", encoding="utf-8", errors="backslashreplace", newline="\n"
            )
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise InputError(f"{path}: cannot write a trace there: {reason}") from None
        self._put([f"# {kind} v1\n", *_preamble(model), ",".join(columns) + "\n"])

    def _put(self, lines: Sequence[str]) -> None:
        """Write whole lines and hand them to the system, so that a crash cannot cut one."""
        try:
            self._file.write("".join(lines))
            self._file.flush()
        except OSError as error:
            raise TuiworkError(
                f"{self._path}: writing the trace failed: {error.strerror}. "
                "The file ends at an earlier token"
            ) from error


class RouteTraceWriter(_TraceFile):
    """Writes a route trace: `add` in the callback, `end_step` between tokens, `end_turn` after.

    A new file replaces one that is there. Not for use by two threads.
    """

    def __init__(self, path: Path, model: TraceModel) -> None:
        super().__init__(path, "route_trace", model, ROUTE_COLUMNS)
        self._rows = np.empty(4096, dtype=_ROW)
        self._count = self._decode_start = 0

    def add(
        self,
        turn: int,
        phase: int,
        step: int | npt.NDArray[np.integer],
        layer: int,
        *,
        expert: npt.NDArray[np.integer],
        weight: npt.NDArray[np.floating] | None,
        residency: npt.NDArray[np.integer | np.bool_],
        expert_bytes: npt.NDArray[np.integer],
        dropped: npt.NDArray[np.integer | np.bool_] | None = None,
        substituted: npt.NDArray[np.integer] | None = None,
    ) -> None:
        """Buffer one load call: arrays of (top-k), or of (tokens, top-k) with one step per token.

        The arrays are copied and may be reused. `weight` None: the graph shows none.
        """
        count = expert.size
        top_k = expert.shape[-1]
        rows = self._room(count)
        rows["turn"] = turn
        rows["phase"] = phase
        rows["step"] = step if isinstance(step, int) else np.repeat(step, top_k)
        rows["layer"] = layer
        rows["slot"] = np.resize(np.arange(top_k), count)
        rows["expert"] = expert.ravel()
        rows["weight"] = np.nan if weight is None else weight.ravel()
        rows["residency"] = residency.ravel()
        rows["expert_bytes"] = expert_bytes.ravel()
        rows["dropped"] = 0 if dropped is None else dropped.ravel()
        rows["substituted"] = NOT_SUBSTITUTED if substituted is None else substituted.ravel()

    def begin_decode(self) -> None:
        """Remember where a decode's rows begin."""
        self._decode_start = self._count

    def undo_decode(self) -> None:
        """Take the decode's rows back: it was stopped, and is repeated."""
        self._count = self._decode_start

    def end_step(self) -> None:
        """Between tokens: write the buffered rows once there are many, in some 100 ms."""
        if self._count >= WRITE_ROWS:
            self.end_turn()

    def end_turn(self) -> None:
        """Write every buffered row."""
        rows = self._rows[: self._count].tolist()
        self._put([_ROUTE_LINE % row for row in rows])
        self._count = 0

    def close(self) -> None:
        """Write what is buffered and close the file."""
        self.end_turn()
        self._file.close()

    def _room(self, count: int) -> npt.NDArray[np.void]:
        while self._count + count > len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
        self._count += count
        return self._rows[self._count - count : self._count]


class IoTraceWriter(_TraceFile):
    """Writes an io trace: one row per read, in the order in which reads finished."""

    def __init__(self, path: Path, model: TraceModel) -> None:
        super().__init__(path, "io_trace", model, IO_COLUMNS)
        self._rows: list[tuple[int | str, ...]] = []

    def add(
        self,
        turn: int,
        phase: int,
        step: int,
        layer: int,
        *,
        expert: int,
        projection: str,
        lane: int,
        speculative: bool,
        offset: int,
        bytes_wanted: int,
        bytes_read: int,
        latency_us: int,
    ) -> None:
        """Buffer one read: of which slice, by which lane, where in the file, and how it went.

        `step` is that of the batch's last token in prefill. `bytes_read` counts the blocks that
        O_DIRECT reads whole, so it is more than `bytes_wanted`, or less at the end of the file.
        """
        where = (turn, phase, step, layer, expert, _word(projection), lane, int(speculative))
        self._rows.append((*where, offset, bytes_wanted, bytes_read, latency_us))

    def end_step(self) -> None:
        """Between tokens: write the buffered rows once there are many."""
        if len(self._rows) >= WRITE_ROWS:
            self.end_turn()

    def end_turn(self) -> None:
        """Write every buffered row."""
        self._put([",".join(map(str, row)) + "\n" for row in self._rows])
        self._rows.clear()

    def close(self) -> None:
        """Write what is buffered and close the file."""
        self.end_turn()
        self._file.close()


def _preamble(model: TraceModel) -> list[str]:
    values = {"model": model.name, "arch": model.arch, "n_layer": model.n_layer}
    values |= {"n_expert": model.n_expert, "n_expert_used": model.n_expert_used}
    values |= model.extra
    words = [f"{key}={_word(value)}" for key, value in values.items()]
    lines = ["# " + " ".join(words) + "\n"]
    for layer, size in sorted(model.expert_bytes.items()):
        dense = f" dense_bytes={model.dense_bytes[layer]}" if layer in model.dense_bytes else ""
        lines.append(f"# layer={layer} expert_bytes={size}{dense}\n")
    return lines


def _word(value: object) -> str:
    """A value as it may stand in a trace, which other readers split at spaces and commas."""
    return _SPLITTING.sub("_", str(value))


def _read_model(table: TraceTable) -> TraceModel:
    values: dict[str, str] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(table.preamble, start=1):
        found = pairs(line)
        if "layer" not in found:
            values |= found
            lines |= dict.fromkeys(found, number)
    shape = {
        key: required_number(table.path, key, values.pop(key, None), lines.get(key, 0))
        for key in ("n_layer", "n_expert", "n_expert_used")
    }
    if shape["n_expert_used"] > shape["n_expert"]:
        raise InputError(
            f"{table.path}, line {lines['n_expert_used']}: "
            f"n_expert_used={shape['n_expert_used']} of n_expert={shape['n_expert']} cannot be"
        )
    expert_bytes, dense_bytes = layer_sizes(table, shape["n_layer"])
    return TraceModel(
        name=values.pop("model", ""),
        arch=values.pop("arch", ""),
        **shape,
        expert_bytes=expert_bytes,
        dense_bytes=dense_bytes,
        extra=values,
    )


def _weights(table: TraceTable, weight: FloatArray | None) -> FloatArray | None:
    if weight is None:
        return None
    with np.errstate(invalid="ignore"):
        bad = np.isinf(weight) | (weight < 0)
    if bad.any():
        row = int(np.argmax(bad))
        shown = table.cell(row, "weight")
        raise table.error(row, f"weight is {shown!r}; allowed is 0 or more, or nan: not shown")
    return weight
