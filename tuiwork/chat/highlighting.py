"""Colours for code. The lexers are not ours and the code is anybody's, so both are kept short."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from pygments.lexer import Lexer  # type: ignore[import-untyped]
from pygments.lexers import get_lexer_by_name  # type: ignore[import-untyped]
from pygments.util import ClassNotFound  # type: ignore[import-untyped]
from textual.content import Content, Span
from textual.highlight import HighlightTheme

LONGEST = 64_000
"""Characters: beyond, colours cost more time than they are worth."""

LONGEST_LINE = 2_000
"""Characters: some lexers take quadratic time on a line."""

STYLES: dict[Any, str] = {
    kind: " ".join(word for word in style.split() if word != "underline")
    for kind, style in HighlightTheme.STYLES.items()
}
"""Textual's own colours, without its lines under names: they look like links."""

_LANGUAGE = re.compile(r"[\w+#.-]{1,30}")


@lru_cache(maxsize=64)
def _lexer(language: str) -> Lexer | None:
    try:
        return get_lexer_by_name(language, stripnl=False, ensurenl=True)
    except ClassNotFound:
        return None


def highlighted(source: str, language: str) -> Content:
    """`source`, which has no tabs, in colours if the language is known."""
    match = _LANGUAGE.match(language)
    lexer = _lexer(match[0].lower()) if match else None
    too_long = len(source) > LONGEST or any(len(line) > LONGEST_LINE for line in source.split("\n"))
    if lexer is None or too_long:
        return Content(source)
    try:
        return Content(source, _spans(source, lexer))
    except Exception:  # a lexer's fault must not cost the answer, only its colours
        return Content(source)


def _spans(source: str, lexer: Lexer) -> list[Span]:
    spans: list[Span] = []
    start = 0
    for kind, text in lexer.get_tokens(source):
        end = start + len(text)
        while kind is not None:
            if style := STYLES.get(kind):
                spans.append(Span(start, min(end, len(source)), style))
                break
            kind = kind.parent
        start = end
    return spans
