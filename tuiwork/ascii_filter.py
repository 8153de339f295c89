"""The screen on a terminal without Unicode: every character replaced by one that it has.

A filter over all that is drawn, Textual's own parts included: what writes a text need not know.
"""

from __future__ import annotations

from functools import lru_cache

from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

_SIGNS = {
    "•": "*", "◦": "-", "▪": "+", "▸": ">", "▾": "v", "▼": "v", "▶": ">", "◀": "<", "▲": "^",
    "↓": "v", "↑": "^", "→": ">", "←": "<", "⏎": "<", "⇥": ">", "‹": "<", "›": ">",
    "·": "-", "…": "~", "–": "-", "—": "-", "−": "-", "×": "x", "µ": "u", "◆": "o", "●": "*",
    "“": '"', "”": '"', "‘": "'", "’": "'", "\u202f": " ", "\u00a0": " ", "✓": "+", "✗": "x",
    "━": "=",
    "▁": "_", "▔": "-", "▏": "|", "▎": "|", "▍": "|", "▌": "|", "▐": "|", "▕": "|", "░": ".",
}  # fmt: skip
# A picture of a control character becomes its letter, as in ^[; its caret would need a cell more.
_PICTURES = {chr(0x2400 + code): chr(0x40 + code) for code in range(0x20)} | {"␡": "?"}
_LINES = {
    chr(code): "-" if chr(code) in "─━╌╍┄┅┈┉═╴╶╸╺" else "|" if chr(code) in "│┃╎╏┆┇┊┋║" else "+"
    for code in range(0x2500, 0x2580)
}
_BLOCKS = {chr(code): "#" for code in range(0x2580, 0x25A0)}
_TABLE = str.maketrans(_LINES | _BLOCKS | _SIGNS | _PICTURES)


class AsciiFilter(LineFilter):
    """What a terminal lacks becomes a sign of its meaning, or a question mark; widths stay."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """The same segments in ASCII."""
        return [
            segment
            if segment.text.isascii()
            else Segment(ascii_of(segment.text), segment.style, segment.control)
            for segment in segments
        ]


@lru_cache(4096)
def ascii_of(text: str) -> str:
    """`text` in ASCII, as wide as it was."""
    text = text.translate(_TABLE)
    if text.isascii():
        return text
    return "".join(sign if sign.isascii() else "?" * cell_len(sign) for sign in text)
