"""Markdown to blocks: markdown-it reads it, this makes it harmless and lays it flat."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from markdown_it import MarkdownIt
from markdown_it.token import Token
from textual.content import Content, Span

from tuiwork.chat.blocks import (
    DIM,
    EMPTY,
    Align,
    Block,
    Code,
    CodePiece,
    Indent,
    Prose,
    Rule,
    Table,
)
from tuiwork.chat.highlighting import highlighted
from tuiwork.chat.untrusted import visible

PIECE_LINES = 20
"""Lines of code laid out together: what one flush of a stream redraws at most."""

HARD_WRAP = 60
"""Characters. A longer line was broken to fit a page and flows on; a shorter one is a verse."""

BULLETS = ("• ", "◦ ", "▪ ")
QUOTE_BAR = "▌ "
ACCENT = "$text-primary"
_HEADINGS = {
    "h1": f"bold underline {ACCENT}",
    "h2": f"bold {ACCENT}",
    "h3": "bold $text-secondary",
}
_MINOR_HEADING = "bold $text"
_INLINE = {"em_open": "italic", "strong_open": "bold", "s_open": "strike", "link_open": ACCENT}
_CODE_INLINE = "$text-warning"


def make_parser() -> MarkdownIt:
    """CommonMark with tables and strike-through. HTML stays text, bare addresses stay text."""
    return MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])


_PARSER = make_parser()


def parse(markdown: str) -> list[Token]:
    """The tokens of `markdown`, which has been made `visible` already."""
    return _PARSER.parse(markdown)


def blocks_of(tokens: Sequence[Token], *, gap_first: bool = False) -> list[Block]:
    """The blocks of some tokens; `gap_first` puts a blank line before the first."""
    return list(_Builder(gap_first).build(tokens))


@dataclass
class _Container:
    """A list item or quote that blocks are inside of."""

    first: Content
    rest: Content
    used: bool = False


class _Builder:
    def __init__(self, gap_first: bool) -> None:
        self._containers: list[_Container] = []
        self._lists: list[int | None] = []  # the next number, or None for bullets
        self._must_gap = gap_first
        self._any = gap_first

    def build(self, tokens: Sequence[Token]) -> Iterator[Block]:
        """Walk the flat token list; everything that is not a leaf only changes the indent."""
        position = 0
        while position < len(tokens):
            token = tokens[position]
            kind = token.type
            if kind == "table_open":
                end = _closing(tokens, position, "table_close")
                yield self._table(tokens[position:end])
                position = end
            elif kind == "heading_open":
                yield self._heading(token, tokens[position + 1])
                position += 2
            elif kind == "paragraph_open":
                yield self._paragraph(token, tokens[position + 1])
                position += 2
            elif kind in ("fence", "code_block"):
                yield from self._code(token)
            elif kind == "hr":
                indent, gap = self._place(gap=1)
                yield Rule(indent, gap)
            else:
                yield from self._enter_or_leave(token)
            if token.level == 0:
                self._must_gap = self._any
            position += 1

    def _enter_or_leave(self, token: Token) -> Iterator[Block]:
        kind = token.type
        if kind == "blockquote_open":
            bar = Content.styled(QUOTE_BAR, ACCENT)
            self._containers.append(_Container(bar, bar))
        elif kind in ("bullet_list_open", "ordered_list_open"):
            start = token.attrs.get("start", 1)
            self._lists.append(int(start) if kind == "ordered_list_open" else None)
        elif kind in ("bullet_list_close", "ordered_list_close"):
            self._lists.pop()
        elif kind == "list_item_open":
            self._containers.append(self._item())
        elif kind in ("list_item_close", "blockquote_close"):
            if not self._containers[-1].used:  # an empty item still shows its bullet
                indent, gap = self._place(gap=0)
                yield Prose(EMPTY, indent, gap)
            self._containers.pop()
        # markdown-it gives close tokens of leaves here too: they say nothing new.

    def _item(self) -> _Container:
        number = self._lists[-1]
        if number is None:
            depth = sum(entry is None for entry in self._lists) - 1
            mark = " " + BULLETS[depth % len(BULLETS)]
        else:
            self._lists[-1] = number + 1
            mark = f" {number}. "
        return _Container(Content.styled(mark, ACCENT), Content(" " * len(mark)))

    def _place(self, gap: int) -> tuple[Indent, tuple[Content, ...]]:
        gap = max(gap, int(self._must_gap)) if self._any else 0
        blank = EMPTY.join([box.rest for box in self._containers if box.used]).rstrip()
        first = EMPTY.join([box.rest if box.used else box.first for box in self._containers])
        rest = EMPTY.join([box.rest for box in self._containers])
        for box in self._containers:
            box.used = True
        self._any, self._must_gap = True, False
        return Indent(first, rest), (blank,) * gap

    def _paragraph(self, token: Token, inline: Token) -> Block:
        # The parser hides the paragraphs of a list that was written without blank lines.
        indent, gap = self._place(gap=0 if token.hidden else 1)
        return Prose(inline_content(inline), indent, gap)

    def _heading(self, token: Token, inline: Token) -> Block:
        indent, gap = self._place(gap=0 if self._lists else 1)
        style = _HEADINGS.get(token.tag, _MINOR_HEADING)
        return Prose(inline_content(inline).stylize_before(style), indent, gap)

    def _code(self, token: Token) -> Iterator[Block]:
        indent, gap = self._place(gap=0 if self._lists else 1)
        yield from code_pieces(visible(token.info.strip()), token.content, indent, gap)

    def _table(self, tokens: Sequence[Token]) -> Block:
        rows: list[list[Content]] = []
        aligns: list[Align] = []
        for token in tokens:
            if token.type == "tr_open":
                rows.append([])
            elif token.type == "th_open":
                aligns.append(_align(token))
            elif token.type == "inline":
                rows[-1].append(inline_content(token))
        indent, gap = self._place(gap=1)
        header, *body = (tuple(row) for row in rows)
        return Table(header, tuple(body), tuple(aligns), indent, gap)


def code_pieces(
    language: str, source: str, indent: Indent, gap: tuple[Content, ...] = ()
) -> list[Block]:
    """A whole code block, highlighted as one and cut into pieces."""
    lines = visible(source).expandtabs(4).removesuffix("\n").split("\n")
    code = Code(language)
    shown = highlighted("\n".join(lines), language).split(allow_blank=True)
    pieces: list[Block] = []
    for start in range(0, max(1, len(lines)), PIECE_LINES):
        code.parts.append("\n".join(lines[start : start + PIECE_LINES]))
        content = Content("\n").join(shown[start : start + PIECE_LINES])
        head = start == 0
        kept = indent if head else Indent(indent.rest, indent.rest)
        pieces.append(CodePiece(code, content, head, kept, gap if head else ()))
    return pieces


def inline_content(token: Token) -> Content:
    """A paragraph's text with its styles; links and images as text with their target.

    What the parser decoded (`&#x202e;`) is made visible again: it was not there before.
    """
    texts: list[str] = []
    spans: list[Span] = []
    opened: list[tuple[int, str, str]] = []
    position = break_at = 0

    def add(text: str, style: str = "") -> None:
        nonlocal position
        text = visible(text)
        if style:
            spans.append(Span(position, position + len(text), style))
        texts.append(text)
        position += len(text)

    for child in token.children or []:
        kind = child.type
        if kind in ("softbreak", "hardbreak"):
            since_break = position - break_at
            wrapped = kind == "softbreak" and since_break >= HARD_WRAP
            add(" " if wrapped else "\n")
            break_at = position
        elif kind == "code_inline":
            add(_flat(child.content), _CODE_INLINE)
        elif kind == "image":
            add(f"[image: {_flat(child.content) or 'no description'}]", ACCENT)
            add(f" ‹{_flat(str(child.attrs.get('src', '')))}›", DIM)
        elif kind in _INLINE:
            opened.append((position, _INLINE[kind], str(child.attrs.get("href", ""))))
        elif kind.endswith("_close") and opened:
            start, style, target = opened.pop()
            spans.append(Span(start, position, style))
            if target and target != "".join(texts)[start:]:
                add(f" ‹{_flat(target)}›", DIM)
        else:
            add(_flat(child.content))
    return Content("".join(texts), spans)


def _flat(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def _align(token: Token) -> Align:
    style = str(token.attrs.get("style", ""))
    found = style.removeprefix("text-align:")
    return cast(Align, found) if found in ("left", "center", "right") else "left"


def _closing(tokens: Sequence[Token], start: int, kind: str) -> int:
    for position in range(start, len(tokens)):
        if tokens[position].type == kind:
            return position
    return len(tokens) - 1
