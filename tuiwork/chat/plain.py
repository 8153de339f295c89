"""The chat on a terminal without Unicode: our own signs replaced, one character for one.

What the model wrote in other scripts stays as it is; a terminal that cannot show it never could.
"""

from __future__ import annotations

from typing import Any

from textual.app import App

ASCII_CLASS = "-ascii"
"""The app has this class where only ASCII can be shown."""

_SIGNS = {
    "•": "*", "◦": "-", "▪": "+", "▌": "|", "─": "-", "━": "=", "│": "|", "┼": "+",
    "▸": ">", "▾": "v", "↓": "v", "‹": "<", "›": ">", "·": "-", "…": "~", "–": "-",
    "“": '"', "”": '"', "‘": "'", "’": "'", "\u202f": " ",
}  # fmt: skip
# A picture of a control character becomes its letter, as in ^[; its caret would need a cell more.
_PICTURES = {chr(0x2400 + code): chr(0x40 + code) for code in range(0x20)} | {"␡": "?"}
_TABLE = str.maketrans(_SIGNS | _PICTURES)


def suited(app: App[Any], text: str) -> str:
    """`text` as this app's terminal can show it; never longer or shorter."""
    return text.translate(_TABLE) if app.has_class(ASCII_CLASS) else text
