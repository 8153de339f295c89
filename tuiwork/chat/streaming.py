"""Markdown that arrives in pieces: finished blocks are parsed once and never looked at again.

Only the block that is still growing is parsed at each flush, and a block that grows past a limit
is cut. So a flush costs the same at the first and at the twenty-thousandth token.
"""

from __future__ import annotations

import re

from markdown_it.token import Token
from textual.content import Content

from tuiwork.chat.blocks import Block, Code, CodePiece, Indent, Prose
from tuiwork.chat.highlighting import highlighted
from tuiwork.chat.parsing import PIECE_LINES, blocks_of, code_pieces, parse
from tuiwork.chat.untrusted import visible

LIST_CUT = 2_000
"""Characters of a list after which its finished items are taken off."""

FORCED_CUT = 12_000
"""Characters that one growing block may have before it is cut wherever a line or word ends."""

RECOLOUR_MOST = 24_000
"""Characters of code that are coloured anew as a whole when the block ends (100 ms at most)."""

_CLOSING_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})[ \t]*")


class StreamedMarkdown:
    """Feed text that has been made `visible`; read `closed`, which only grows, and `tail`."""

    def __init__(self) -> None:
        self.closed: list[Block] = []
        self.tail: list[Block] = []
        self.recoloured: list[tuple[int, list[Block]]] = []
        """Code blocks that ended: where their pieces start in `closed`, and the final pieces."""
        self._source = ""
        self._fence: _OpenFence | None = None
        self._fence_start = 0
        self._continues_tight_list = False

    def feed(self, text: str) -> None:
        """Add a piece. The cost depends on the piece and the last block, not on all before."""
        self._source += text
        while self._step():
            pass

    def finish(self) -> None:
        """No more text will come: what is open is closed."""
        if self._fence:
            self._end_fence(self._fence, self._source)
            self._source = ""
        self._close(self.tail)
        self._source, self.tail = "", []

    def _step(self) -> bool:
        """Take finished blocks off the source; true if what follows must be looked at anew."""
        if self._fence:
            return self._step_fence(self._fence)
        tokens = _parse_safely(self._source)
        if tokens is None:
            self.tail = [Prose(Content(self._source), gap=self._gap())]
            return False
        cut = self._cut(tokens)
        if cut is None:
            self.tail = blocks_of(tokens, gap_first=self._gap_first)
            return False
        lines, fence, tight = cut
        head, rest = _split_lines(self._source, lines)
        if not fence:
            self._close(blocks_of(parse(head), gap_first=self._gap_first))
            self._continues_tight_list = tight
            self._source = rest
            return bool(rest)
        self._close(blocks_of(parse(head), gap_first=self._gap_first))
        self._open_fence(fence, rest)
        return True

    def _cut(self, tokens: list[Token]) -> tuple[int, Token | None, bool] | None:
        """Where finished blocks end, as (lines, fence that opens there, inside a tight list).

        A block is finished when another begins after it, on a line that is complete: what an
        incomplete line will be, its next character may still change.
        """
        n_complete = self._source.count("\n")
        tops = [token for token in tokens if token.level == 0 and token.map]
        starts = [token for token in tops if token.map and token.map[0] < n_complete]
        if not starts:
            return self._forced_cut()
        last = starts[-1]
        start = last.map[0] if last.map else 0
        if last.type == "fence" and last is tops[-1]:
            return start, last, False
        if start > 0:
            return start, None, False
        if last.type.endswith("list_open") and len(self._source) > LIST_CUT:
            items = [
                token.map[0]
                for token in tokens
                if token.type == "list_item_open" and token.level == 1 and token.map
            ]
            items = [line for line in items if 0 < line < n_complete]
            if items:
                return items[-1], None, any(token.hidden for token in tokens)
        return self._forced_cut()

    def _forced_cut(self) -> tuple[int, Token | None, bool] | None:
        if len(self._source) <= FORCED_CUT:
            return None
        end = max(self._source.rfind("\n", 0, FORCED_CUT), 0)
        if not end:
            space = self._source.rfind(" ", FORCED_CUT // 2, FORCED_CUT)
            end = space if space > 0 else FORCED_CUT
            self._source = self._source[:end] + "\n" + self._source[end:].removeprefix(" ")
        return self._source.count("\n", 0, end + 1), None, True

    @property
    def _gap_first(self) -> bool:
        return bool(self.closed) and not self._continues_tight_list

    def _gap(self) -> tuple[Content, ...]:
        return (Content(""),) if self._gap_first else ()

    def _close(self, blocks: list[Block]) -> None:
        if blocks:
            self.closed += blocks
            self._continues_tight_list = False

    def _open_fence(self, token: Token, source: str) -> None:
        opening, _, self._source = source.partition("\n")
        indent = len(opening) - len(opening.lstrip(" "))
        self._fence = _OpenFence(visible(token.info.strip()), token.markup, indent)
        self._fence_start = len(self.closed)

    def _step_fence(self, fence: _OpenFence) -> bool:
        *complete, partial = self._source.split("\n")
        for number, line in enumerate(complete):
            if fence.is_closing(line):
                self._end_fence(fence, "")
                self._source = "\n".join([*complete[number + 1 :], partial])
                return True
            fence.add(line)
            if len(fence.lines) >= PIECE_LINES:
                self.closed.append(fence.piece(fence.lines, self._gap()))
                fence.taken(fence.lines)
        self._source = partial
        if len(partial) > FORCED_CUT:
            partial = partial[:FORCED_CUT] + "…"  # shown whole when the line is complete
        lines = [*fence.lines, fence.unindented(partial)] if partial else fence.lines
        self.tail = [] if fence.n_pieces and not lines else [fence.piece(lines, self._gap())]
        return False

    def _end_fence(self, fence: _OpenFence, partial: str) -> None:
        if partial and not fence.is_closing(partial):
            fence.add(partial)
        self.tail, self._fence = [], None
        gap = (Content(""),) if self._fence_start else ()
        if len(fence.source) > RECOLOUR_MOST:
            if fence.lines:
                self.closed.append(fence.piece(fence.lines, gap))
            return
        final = code_pieces(fence.language, fence.source + "\n", Indent(), gap)
        del self.closed[self._fence_start :]
        self.closed += final
        if fence.n_pieces:
            self.recoloured.append((self._fence_start, final))


class _OpenFence:
    """A fenced code block at the top level whose end has not come yet."""

    def __init__(self, language: str, markup: str, indent: int) -> None:
        self.language = language
        self.n_pieces = 0
        self.lines: list[str] = []
        self._all: list[str] = []
        self._markup = markup
        self._indent = indent
        self._code = Code(language)

    @property
    def source(self) -> str:
        """All of the code so far."""
        return "\n".join(self._all)

    def is_closing(self, line: str) -> bool:
        """Whether this line ends the block."""
        match = _CLOSING_FENCE.fullmatch(line)
        return bool(match) and match is not None and match[1].startswith(self._markup)

    def unindented(self, line: str) -> str:
        """The line without the indent that the opening fence had."""
        spaces = len(line) - len(line.lstrip(" "))
        return line[min(spaces, self._indent) :]

    def add(self, line: str) -> None:
        """One more complete line."""
        self.lines.append(self.unindented(line))
        self._all.append(self.lines[-1])

    def piece(self, lines: list[str], gap: tuple[Content, ...]) -> CodePiece:
        """These lines as they look until the block ends: coloured by themselves."""
        text = "\n".join(lines).expandtabs(4)
        self._code.parts[:] = [self.source]
        head = self.n_pieces == 0
        return CodePiece(
            self._code, highlighted(text, self.language), head, gap=gap if head else ()
        )

    def taken(self, lines: list[str]) -> None:
        """These lines are shown as a piece of their own from now on."""
        self.n_pieces += 1
        self.lines = []


def _parse_safely(source: str) -> list[Token] | None:
    try:
        return parse(source)
    except Exception:  # a fault in the parser must not cost the answer, only its looks
        return None


def _split_lines(source: str, lines: int) -> tuple[str, str]:
    parts = source.split("\n", lines)
    if len(parts) <= lines:
        return source, ""
    rest = parts.pop()
    return "\n".join(parts) + "\n", rest
