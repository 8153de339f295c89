"""Token metrics, read: a run's figures per token, from any engine that writes the format.

Readers go by column name. A column that is missing, and a value that was not measured (-1, or an
empty field), is unknown and never 0; unknown columns and preamble keys are kept as texts. What
would make a figure wrong is refused with file, line and column.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.errors import InputError
from engine.telemetry import COLUMNS, UNMEASURED
from engine.trace_table import pairs, read_text

FloatArray = npt.NDArray[np.float64]

TIME = "wall_ms"
"""The one column without which nothing can be said."""

LARGEST = 1e18
"""Far above any figure, and so small that sums of them stay numbers."""

OWN_FORMAT = "tuiwork_metrics v1"

_FORMAT = re.compile(r"#\s*(\w+ v\d+)\s*$")
_TRACE = re.compile(r"#\s*(route_trace|io_trace)\b")
_SUMMARY = re.compile(r"#\s*summary\b")
_SUMMARY_PAIR = re.compile(r"(\S+?)=(\S+)")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)


@dataclass(frozen=True)
class TokenMetrics:
    """A run's file: one entry per decoded token in each column, in the file's order."""

    path: Path
    format: str
    """What the first line says, as in `tuiwork_metrics v1`; empty: nothing."""
    preamble: Mapping[str, str]
    """The run's version and configuration by key, as the file has them."""
    columns: Mapping[str, FloatArray]
    """Known columns by name; `nan` where not measured. `wall_ms` is always there and above 0."""
    extra: Mapping[str, Sequence[str]]
    """Unknown columns, as the file has them."""
    summary: Mapping[str, str]
    """The figures of the `# summary` line by key; empty where there is none."""

    def __len__(self) -> int:
        return len(self.columns[TIME])

    def measured(self, name: str, skip: int = 0) -> FloatArray | None:
        """A column from token `skip` on; None unless every value of it was measured."""
        values = self.columns.get(name)
        if values is None or np.isnan(values[skip:]).any():
            return None
        return values[skip:]

    def preamble_value(self, *keys: str) -> str | None:
        """What the preamble says under the first of `keys` that it has."""
        return next((self.preamble[key] for key in keys if key in self.preamble), None)


@dataclass(frozen=True)
class _Line:
    number: int
    text: str


def read_metrics(path: Path) -> TokenMetrics:
    """The token metrics in a file.

    Raises InputError, with file, line and column, for a file that cannot be read, has no rows or no
    `wall_ms`, was cut off, holds more than one run, or has a value that cannot be.
    """
    _refuse_models(path)
    text = read_text(path).removeprefix("\ufeff")
    whole = text.endswith("\n")
    lines = [_Line(n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise InputError(f"{path}, line 1: the file is empty")
    _refuse_traces(path, lines[0].text)
    top = next((n for n, line in enumerate(lines) if not line.text.startswith("#")), len(lines))
    if top == len(lines):
        raise InputError(f"{path}: has no rows, not even a header with the columns' names")
    header = _header(path, lines[top])
    rows, summary = _body(path, lines[top + 1 :], header, whole)
    known = [name for name in header if name in COLUMNS]
    columns = {name: _numbers(path, rows, header, name) for name in known}
    _require_times(path, rows, columns[TIME])
    head = [line.text for line in lines[:top]]
    found = _FORMAT.match(head[0]) if head else None
    return TokenMetrics(
        path=path,
        format=found[1] if found else "",
        preamble=_preamble(head),
        columns=columns,
        extra={
            name: [row.text.split(",")[n].strip() for row in rows]
            for n, name in enumerate(header)
            if name not in COLUMNS
        },
        summary=summary,
    )


def _refuse_models(path: Path) -> None:
    """Someone who gives the model instead of its metrics must not wait while 20 GB are read."""
    try:
        with path.open("rb") as file:
            is_model = path.is_file() and file.read(4) == b"GGUF"
    except (OSError, ValueError):
        return  # reading it whole says why
    if is_model:
        raise InputError(f"{path}: is a model, not token metrics as `tuiwork run --csv` writes")


def _refuse_traces(path: Path, first: str) -> None:
    trace = _TRACE.match(first)
    if trace:
        hint = "; `tuiwork replay` reads it" if trace[1] == "route_trace" else ""
        raise InputError(
            f"{path}, line 1: this is a {trace[1].replace('_', ' ')}, not token metrics as "
            f"`tuiwork run --csv` writes them{hint}"
        )


def _header(path: Path, line: _Line) -> list[str]:
    header = [name.strip() for name in line.text.split(",")]
    where = f"{path}, line {line.number}"
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{where}: the column {twice!r} is there twice")
    if TIME not in header:
        shown = ", ".join(header)
        shown = shown if len(shown) <= 120 else shown[:120] + "…"
        raise InputError(
            f"{where}: there is no column {TIME} (a token's time in ms), without which there is no "
            f"rate; the columns are {shown}"
        )
    return header


def _body(
    path: Path, lines: Sequence[_Line], header: Sequence[str], whole: bool
) -> tuple[list[_Line], dict[str, str]]:
    """The rows, and the summary behind them."""
    rows: list[_Line] = []
    summary: dict[str, str] = {}
    ended = None
    for line in lines:
        where = f"{path}, line {line.number}"
        if line.text.startswith("#"):
            if _SUMMARY.match(line.text):
                # What a summary cut short says last may be wrong; the rows above it are whole.
                last = line is lines[-1] and not whole
                summary = {} if last else dict(_SUMMARY_PAIR.findall(line.text))
                ended = line.number
            continue
        if [cell.strip() for cell in line.text.split(",")] == list(header):
            raise InputError(
                f"{where}: a second header: the file holds more than one run. Split it there"
            )
        if ended is not None:
            raise InputError(
                f"{where}: a row behind the summary of line {ended}: the file holds more than one "
                "run. Split it there"
            )
        rows.append(line)
    if not rows:
        raise InputError(f"{path}: there are no rows under the header: no token was measured")
    if not whole and rows[-1] is lines[-1]:
        raise InputError(
            f"{path}, line {rows[-1].number}: the last line does not end, so the recording was cut "
            "off there and its last value may be wrong. Delete that line to use the rest"
        )
    _check_widths(path, rows, header)
    return rows, summary


def _check_widths(path: Path, rows: Sequence[_Line], header: Sequence[str]) -> None:
    for row in rows:
        width = row.text.count(",") + 1
        if width != len(header):
            raise InputError(
                f"{path}, line {row.number}: {width} values in a table of {len(header)} columns: "
                "the line was cut, or belongs to another table. Delete it, or split the file there"
            )


def _numbers(path: Path, rows: Sequence[_Line], header: Sequence[str], name: str) -> FloatArray:
    """A column's values, `nan` where not measured."""
    column = header.index(name)
    values = np.empty(len(rows))
    for n, row in enumerate(rows):
        text = row.text.split(",")[column].strip()
        value = _number(text)
        if value is None:
            raise InputError(
                f"{path}, line {row.number}, {name}: {text[:40]!r} is no number from 0 on; what "
                "was not measured is -1 or empty"
            )
        values[n] = value
    return values


def _number(text: str) -> float | None:
    """A value from 0 on, `nan` for an unmeasured one, None for what cannot be."""
    if not text:
        return math.nan
    # Python would take 1_000, too, and the digits of every script.
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    if value == UNMEASURED:
        return math.nan
    return value if 0 <= value <= LARGEST else None


def _require_times(path: Path, rows: Sequence[_Line], times: FloatArray) -> None:
    bad = ~(times > 0)
    if bad.any():
        row = rows[int(np.argmax(bad))]
        raise InputError(
            f"{path}, line {row.number}, {TIME}: a token's time must be a number above 0: without "
            "it there is no rate"
        )


def _preamble(head: Sequence[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    own = bool(head) and head[0].lstrip("# ").strip() == OWN_FORMAT
    for line in head:
        if own:
            # One pair a line, so that a file's name may hold anything.
            key, equals, value = line.lstrip("#").strip().partition("=")
            values |= {key: value} if equals else {}
        else:
            values |= pairs(line)
    return values
