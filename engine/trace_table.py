"""A trace as a table: a `#` preamble, a header with the columns' names, one line of values per row.

Owns the text of a trace file and finds the line behind every complaint. It knows no column: what
they mean is in `engine.traces`. A file is held in memory whole (30 bytes a row).
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.errors import InputError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
TextArray = npt.NDArray[np.str_]

PAIR = re.compile(r"(\w+)=(.*?)(?=\s+\w+=|\s*$)")
"""`key=value` in a preamble line; a value may hold spaces, as file names do."""

NEWLINE, RETURN, TAB, COMMA = b"\n\r\t,"


@dataclass(frozen=True)
class TraceTable:
    """The text of a trace, cut into preamble, header and rows, every row of the header's length."""

    path: Path
    preamble: tuple[str, ...]
    """The `#` lines, the first included, as they stand in the file."""
    header: tuple[str, ...]
    rows: list[str]
    """The lines under the header."""

    @property
    def first_line(self) -> int:
        """The line of the first row, counted from 1."""
        return len(self.preamble) + 2

    def error(self, row: int, message: str) -> InputError:
        """A complaint about a row, with its file and line."""
        return InputError(f"{self.path}, line {self.first_line + row}: {message}")

    def cell(self, row: int, name: str) -> str:
        """What the file says at a row and column."""
        return self.rows[row].split(",")[self.header.index(name)]

    def require(self, names: tuple[str, ...]) -> None:
        """Refuse a table without one of these columns."""
        missing = [name for name in names if name not in self.header]
        if missing:
            raise InputError(
                f"{self.path}, line {self.first_line - 1}: the header lacks the column"
                f"{'s' if len(missing) > 1 else ''} {', '.join(missing)}; "
                f"needed are {', '.join(names)}"
            )

    def numbers(self, names: list[str]) -> dict[str, FloatArray]:
        """These columns as numbers, `nan` where the file says so; InputError at other texts."""
        columns = [self.header.index(name) for name in names]
        try:
            values = _parse("\n".join(self.rows), columns)
        except ValueError:
            raise self._not_a_number(names) from None
        return dict(zip(names, values.T, strict=True))

    def whole(self, name: str, values: FloatArray, low: int, high: int) -> IntArray:
        """A column of numbers as whole ones from `low` to `high`, both included."""
        with np.errstate(invalid="ignore"):
            good = (values >= low) & (values <= high) & (values == np.floor(values))
        if not good.all():
            row = int(np.argmin(good))
            raise self.error(
                row,
                f"{name} is {self.cell(row, name)!r}; "
                f"allowed is a whole number from {low} to {high}",
            )
        return values.astype(np.int64)

    def texts(self, name: str) -> TextArray:
        """A column as the file has it."""
        column = self.header.index(name)
        return np.array([row.split(",")[column] for row in self.rows], dtype=np.str_)

    def _not_a_number(self, names: list[str]) -> InputError:
        for row in range(len(self.rows)):
            for name in names:
                try:
                    # With a second value, so that an empty cell does not count as an empty file.
                    _parse(self.cell(row, name) + ",0", [0])
                except ValueError:
                    return self.error(row, f"{name} is {self.cell(row, name)!r}, not a number")
        return InputError(f"{self.path}: a value is not a number")


def read_table(path: Path, kind: str) -> TraceTable:
    """The table of a trace whose first line is `# <kind> v1`.

    Raises InputError, with the line, for a file that cannot be read, is not such a trace, was cut
    off in its last line, or has rows that do not fit the header.
    """
    text = read_text(path)
    lines = text.split("\n")
    if lines[0].split() != ["#", kind, "v1"]:
        raise InputError(f"{path}, line 1: {_wrong_start(lines[0], kind)}")
    if lines[-1]:
        raise InputError(
            f"{path}, line {len(lines)}: the last line does not end, so the recording was cut off "
            "there and its last value may be wrong. Delete that line to use the rest"
        )
    lines.pop()
    top = next((n for n, line in enumerate(lines) if not line.startswith("#")), len(lines))
    if top == len(lines):
        raise InputError(f"{path}, line {top + 1}: the header with the columns' names is missing")
    header = tuple(name.strip() for name in lines[top].split(","))
    twice = [name for name in header if header.count(name) > 1]
    if twice:
        raise InputError(f"{path}, line {top + 1}: the column {twice[0]!r} is there twice")
    table = TraceTable(path, tuple(lines[:top]), header, lines[top + 1 :])
    if not table.rows:
        raise InputError(f"{path}, line {table.first_line}: there are no rows under the header")
    _check_widths(table)
    return table


def pairs(line: str) -> dict[str, str]:
    """The `key=value` pairs of a preamble line."""
    return dict(PAIR.findall(line.lstrip("#")))


def _parse(text: str, columns: list[int]) -> FloatArray:
    # The only spelling of "not shown" that numpy's parser does not know is Windows' own.
    text = text.replace("nan(ind)", "nan")
    return np.loadtxt(io.StringIO(text), delimiter=",", comments=None, usecols=columns, ndmin=2)


def read_text(path: Path) -> str:
    """A table's text, its lines ended by newlines alone. Raises InputError, with the line."""
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{path}: cannot be read: {reason}") from None
    if not data:
        raise InputError(f"{path}, line 1: the file is empty")
    data = data.replace(b"\r\n", b"\n")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}, line {line}: this is not text in UTF-8") from None
    codes = np.frombuffer(data, dtype=np.uint8)
    # numpy's parser ends a row at a lone carriage return, which would shift every later line.
    control = (codes < 32) & (codes != NEWLINE) & (codes != TAB)
    if control.any():
        line = data.count(b"\n", 0, int(np.argmax(control))) + 1
        raise InputError(f"{path}, line {line}: there is a control character in the text")
    return text


def _wrong_start(line: str, kind: str) -> str:
    words = line.split()
    if words[:2] == ["#", kind]:
        return f"this is {kind} {' '.join(words[2:])!r}; readable is v1"
    shown = line if len(line) <= 40 else line[:40] + "…"
    return f"the preamble is missing: the file must begin with '# {kind} v1', not {shown!r}"


def _check_widths(table: TraceTable) -> None:
    width = len(table.header)
    commas = np.array([row.count(",") for row in table.rows])
    if (commas != width - 1).any():
        row = int(np.argmax(commas != width - 1))
        raise table.error(row, f"{commas[row] + 1} values in a table of {width} columns")
