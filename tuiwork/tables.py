"""Tables of figures for a terminal of 80 columns. What was not measured shows as a dash."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

UNAVAILABLE = "–"

WIDTH = 80
"""Columns of the narrowest terminal that shows the tables whole."""


def section(title: str, header: list[str], rows: Sequence[list[str]], above: str = "") -> str:
    """A titled grid, all columns flush right."""
    if not rows:
        return ""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [wrapped(title), *([above] if above else [])]
    for row in [header, *rows]:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def number(value: float | None, digits: int = 1) -> str:
    """A figure with so many decimals, or a dash."""
    return UNAVAILABLE if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def count(amount: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{amount} {noun}{'' if amount == 1 else 's'}"


def wrapped(text: str, indent: int = 0) -> str:
    """A paragraph in the table's width, its further lines indented."""
    return textwrap.fill(text, width=WIDTH, subsequent_indent=" " * indent)
