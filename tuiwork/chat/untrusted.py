"""Text of a model or a file, made harmless and honest before it gets near the screen.

`tuiwork.text.sanitize` makes visible what a terminal would obey. A chat has one more worry: what
a reader cannot see but copies, and what makes one line look like two.
"""

from __future__ import annotations

from tuiwork.text import sanitize

_UNSEEN = (
    (0x00AD, 0x00AD),  # soft hyphen
    (0x061C, 0x061C),  # Arabic letter mark
    (0x115F, 0x1160),  # Hangul fillers
    (0x180B, 0x180F),  # Mongolian selectors and vowel separator
    (0x200B, 0x200B),  # zero-width space; the joiners after it are needed by scripts and emoji
    (0x200E, 0x200F),  # direction marks
    (0x2028, 0x2029),  # line and paragraph separators: Python splits lines at them
    (0x2060, 0x2065),  # word joiner, invisible operators
    (0x206A, 0x206F),  # deprecated format controls
    (0x3164, 0x3164),  # Hangul filler
    (0xFEFF, 0xFEFF),  # byte order mark
    (0xFFA0, 0xFFA0),  # halfwidth Hangul filler
    (0xFFF9, 0xFFFB),  # interlinear annotation
    (0xE0000, 0xE007F),  # tags: a whole hidden ASCII
)
_NAMED = {
    code: f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    for first, last in _UNSEEN
    for code in range(first, last + 1)
}


def visible(text: str) -> str:
    """`text` with every control, direction and invisible character shown by symbol or number.

    Newlines and tabs stay. Works character by character, so that it suits pieces of a stream.
    """
    return sanitize(text).translate(_NAMED)


def without_unseen(text: str) -> str:
    """`text` without the characters that nobody can see; what a terminal obeys is made visible.

    For a person's own text: what they see is what is sent.
    """
    return sanitize(text.translate(dict.fromkeys(_NAMED)))


class LineEnds:
    """Makes CR LF one newline, over any chunking of a text; a lone CR is left to `visible`."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, piece: str) -> str:
        """What of the text so far can be told apart by now."""
        text = self._held + piece
        self._held = "\r" if text.endswith("\r") else ""
        return (text[:-1] if self._held else text).replace("\r\n", "\n")

    def finish(self) -> str:
        """What was still undecided."""
        held, self._held = self._held, ""
        return held
