"""What an answer is made of, and how each part is laid out in a given width.

A block turns into lines of `Content`: text with style spans and nothing else. There is no markup
and no action in them, so nothing in an answer can be clicked or obeyed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

from textual.content import Content

EMPTY = Content("")
NARROWEST = 8
"""Cells that a text keeps however deep it is nested."""

DIM = "$foreground 55%"
CODE_GROUND = "on $surface-darken-1"
RULE = "─"
COPY_HINT = "copy"
_CELL_GAP = 3
_LEAST_COLUMN = 3


@dataclass(frozen=True)
class Indent:
    """What stands left of a block: bullets and quote bars."""

    first: Content = EMPTY
    rest: Content = EMPTY

    def room(self, width: int) -> int:
        """Cells left for the text."""
        return max(min(width, NARROWEST), width - self.first.cell_length)

    def apply(self, lines: list[Content], width: int) -> list[Content]:
        """The lines with the indent before them, cut where it leaves no room."""
        kept = width - self.room(width)
        heads = (self.first.truncate(kept), self.rest.truncate(kept))
        return [heads[number > 0] + line for number, line in enumerate(lines)]


class Block(Protocol):
    """A part of an answer that can be laid out by itself."""

    @property
    def gap(self) -> tuple[Content, ...]:
        """The blank lines before it (with quote bars, where it is inside a quote)."""

    def lines(self, width: int) -> list[Content]:
        """The block in lines of at most `width` cells, without the gap."""


@dataclass(frozen=True)
class Prose:
    """A paragraph, a heading or a list item's text."""

    content: Content
    indent: Indent = Indent()
    gap: tuple[Content, ...] = ()

    def lines(self, width: int) -> list[Content]:
        """The text wrapped at words."""
        return self.indent.apply(self.content.wrap(self.indent.room(width)), width)


@dataclass(frozen=True)
class Rule:
    """A horizontal rule."""

    indent: Indent = Indent()
    gap: tuple[Content, ...] = ()

    def lines(self, width: int) -> list[Content]:
        """One line across."""
        line = Content.styled(RULE * self.indent.room(width), DIM)
        return self.indent.apply([line], width)


@dataclass
class Code:
    """One code block's source, however many pieces it is shown in."""

    language: str
    """As the model named it, made visible; may be empty."""
    parts: list[str] = field(default_factory=list)

    @property
    def source(self) -> str:
        """The code as it is copied."""
        return "\n".join(self.parts)


@dataclass(frozen=True)
class CodePiece:
    """Some lines of a code block; only the first piece has the head line."""

    code: Code
    content: Content
    head: bool = True
    indent: Indent = Indent()
    gap: tuple[Content, ...] = ()

    def lines(self, width: int) -> list[Content]:
        """The code on its own ground, long lines folded."""
        room = self.indent.room(width)
        inner = max(1, room - 2)
        lines = [
            self._grounded(Content.styled(" ", CODE_GROUND) + line, room)
            for line in self.content.wrap(inner)
        ]
        if self.head:
            lines.insert(0, self._head(room))
        return self.indent.apply(lines, width)

    def _head(self, room: int) -> Content:
        name = self.code.language.split()[0] if self.code.language.split() else "code"
        left = Content.styled(f" {name}", f"{DIM} italic")
        fill = room - left.cell_length - len(COPY_HINT) - 1
        if fill < 1:
            return self._grounded(left.truncate(room), room)
        return self._grounded(left.pad_right(fill) + Content.styled(COPY_HINT, DIM), room)

    @staticmethod
    def _grounded(line: Content, room: int) -> Content:
        return line.pad_right(max(0, room - line.cell_length)).stylize_before(CODE_GROUND)


Align = Literal["left", "center", "right"]


@dataclass(frozen=True)
class Table:
    """A table; cells wrap when the width is short."""

    header: tuple[Content, ...]
    rows: tuple[tuple[Content, ...], ...]
    aligns: tuple[Align, ...]
    indent: Indent = Indent()
    gap: tuple[Content, ...] = ()

    @cached_property
    def _natural(self) -> list[int]:
        columns = range(len(self.header))
        return [
            max(_widest(row[column]) for row in (self.header, *self.rows) if column < len(row))
            for column in columns
        ]

    def lines(self, width: int) -> list[Content]:
        """Header, a line, and the rows, in columns that fit."""
        room = self.indent.room(width)
        widths = fit_columns(self._natural, room - _CELL_GAP * (len(self.header) - 1))
        lines = self._row(tuple(cell.stylize("bold") for cell in self.header), widths)
        lines.append(Content.styled("─┼─".join(RULE * column for column in widths), DIM))
        for row in self.rows:
            lines += self._row(row, widths)
        # More columns than cells: what does not fit is cut rather than left to spoil the grid.
        lines = [line.truncate(room, ellipsis=True) for line in lines]
        return self.indent.apply(lines, width)

    def _row(self, cells: tuple[Content, ...], widths: list[int]) -> list[Content]:
        wrapped = [cell.wrap(width) or [EMPTY] for cell, width in zip(cells, widths, strict=False)]
        wrapped += [[EMPTY]] * (len(widths) - len(wrapped))
        height = max(map(len, wrapped), default=1)
        bar = Content.styled(" │ ", DIM)
        return [
            bar.join(
                _aligned(cell[y] if y < len(cell) else EMPTY, width, align)
                for cell, width, align in zip(wrapped, widths, self.aligns, strict=True)
            )
            for y in range(height)
        ]


def fit_columns(natural: list[int], room: int) -> list[int]:
    """Column widths that need at most `room` cells, where that can be: the widest give way."""
    widths = [max(_LEAST_COLUMN, width) for width in natural]
    while sum(widths) > room and max(widths) > _LEAST_COLUMN:
        widest = max(widths)
        at_widest = [n for n, width in enumerate(widths) if width == widest]
        next_widest = max((width for width in widths if width < widest), default=_LEAST_COLUMN)
        excess = sum(widths) - room
        step = min(widest - max(next_widest, _LEAST_COLUMN), -(-excess // len(at_widest)))
        for n in at_widest:
            widths[n] -= max(1, step)
    return widths


def _widest(cell: Content) -> int:
    return max((line.cell_length for line in cell.split(allow_blank=True)), default=0)


def _aligned(cell: Content, width: int, align: Align) -> Content:
    space = max(0, width - cell.cell_length)
    if align == "right":
        return cell.pad_left(space)
    if align == "center":
        return cell.pad(space // 2, space - space // 2)
    return cell.pad_right(space)
