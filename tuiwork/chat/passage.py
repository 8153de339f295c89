"""Blocks on the screen: a few dozen lines drawn as one widget, and an answer as a few of those.

Textual has a Markdown widget, one child widget per block. With 20 000 tokens that is 1 500
widgets, and a flush takes 110 ms instead of 10: each one relays out all of them. Here a flush
touches the last widget only.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.segment import Segment
from textual import events
from textual.app import RenderResult
from textual.containers import Vertical
from textual.content import Content
from textual.css.styles import RulesMap
from textual.message import Message
from textual.selection import Selection
from textual.strip import Strip
from textual.style import Style
from textual.visual import RenderOptions, Visual
from textual.widget import Widget

from tuiwork.chat.blocks import DIM, Block, Code, CodePiece, Prose, Table
from tuiwork.chat.streaming import StreamedMarkdown
from tuiwork.chat.untrusted import visible
from tuiwork.kept import KeptLines

PASSAGE_WEIGHT = 60
"""About how many lines a passage holds; each of its redraws walks them all."""


class Passage(KeptLines, Widget):
    """Some blocks, laid out once per width and drawn line by line."""

    DEFAULT_CSS = "Passage { width: 1fr; height: auto; }"

    class CodeClicked(Message):
        """Somebody clicked a code block."""

        def __init__(self, code: Code) -> None:
            super().__init__()
            self.code = code

    def __init__(self, blocks: Sequence[Block] = ()) -> None:
        super().__init__()
        self.auto_links = False
        self._blocks = list(blocks)
        self._laid: list[tuple[Block, list[Content]]] = []
        self._laid_width = 0
        self._lines: list[Content] = []
        self._drawn: list[tuple[Content, Strip]] = []
        self._drawn_style: Style | None = None

    @property
    def blocks(self) -> Sequence[Block]:
        """What is shown."""
        return self._blocks

    def show(self, blocks: list[Block]) -> None:
        """Show these blocks; those that were shown before are neither laid out nor drawn anew."""
        if blocks == self._blocks:
            return
        self._blocks = blocks
        width, before = self._laid_width, len(self._lines)
        self._laid_width = 0
        if width:
            self.refresh(layout=len(self.lines(width)) != before)
        else:
            self.refresh(layout=True)

    def lines(self, width: int) -> list[Content]:
        """Every line at this width, gaps included."""
        if width == self._laid_width:
            return self._lines
        known = {id(block): lines for block, lines in self._laid} if self._fits(width) else {}
        self._laid = [
            (block, known.get(id(block)) or [*block.gap, *block.lines(width)])
            for block in self._blocks
        ]
        self._last_width = self._laid_width = width
        self._lines = [line for _, lines in self._laid for line in lines]
        return self._lines

    _last_width = 0

    def _fits(self, width: int) -> bool:
        return width == self._last_width

    def strips(self, width: int, style: Style, options: RenderOptions) -> list[Strip]:
        """The lines as they are painted."""
        if style != self._drawn_style:
            self._drawn, self._drawn_style = [], style
        selecting = options.selection is not None
        drawn = []
        for y, line in enumerate(self.lines(width)):
            if not selecting and y < len(self._drawn) and self._drawn[y][0] is line:
                drawn.append(self._drawn[y])
            else:
                drawn.append((line, _strip(line, y, style, options)))
        if not selecting:
            self._drawn = drawn
        return [strip for _, strip in drawn]

    def render(self) -> RenderResult:
        """What Textual asks for."""
        return _PassageVisual(self)

    def notify_style_update(self) -> None:
        """Another theme: the same lines in other colours."""
        self._drawn = []
        super().notify_style_update()

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The selected part, as it is on the screen."""
        text = "\n".join(line.plain for line in self._lines)
        picked = selection.extract(text)
        return "\n".join(line.rstrip() for line in picked.split("\n")), "\n"

    def on_click(self, event: events.Click) -> None:
        """A click on code is a wish to copy it; one that ends a selection is not."""
        block = self.block_at(event.get_content_offset_capture(self).y)
        if isinstance(block, CodePiece) and self.text_selection is None:
            self.post_message(self.CodeClicked(block.code))

    def block_at(self, y: int) -> Block | None:
        """The block at a line of this widget."""
        for block, lines in self._laid:
            if y < len(lines):
                return block
            y -= len(lines)
        return None


class _PassageVisual(Visual):
    def __init__(self, passage: Passage) -> None:
        self._passage = passage

    def render_strips(
        self, width: int, height: int | None, style: Style, options: RenderOptions
    ) -> list[Strip]:
        return self._passage.strips(width, style, options)[:height]

    def get_optimal_width(self, rules: RulesMap, container_width: int) -> int:
        return container_width

    def get_height(self, rules: RulesMap, width: int) -> int:
        return len(self._passage.lines(width))


def _strip(line: Content, y: int, style: Style, options: RenderOptions) -> Strip:
    if options.selection is not None and options.selection_style is not None:
        span = options.selection.get_span(y)
        if span is not None:
            start, end = span
            line = line.stylize(options.selection_style, start, len(line) if end == -1 else end)
    segments = []
    x = 0
    for text, own in line.render(style, end="", parse_style=options.get_style):
        # The offset is how Textual finds the text under the mouse when somebody selects it.
        segments.append(Segment(text, (style + own).rich_style_with_offset(x, y)))
        x += len(text)
    return Strip(segments, line.cell_length)


class Body(KeptLines, Vertical):
    """A whole answer (or its reasoning) as it streams."""

    DEFAULT_CSS = "Body { width: 1fr; height: auto; }"

    def __init__(self, text: str = "", *, foot: str = "") -> None:
        """`text` is the whole of it, already `visible`; empty: it is still to come."""
        super().__init__()
        self._stream = StreamedMarkdown()
        self._pending: list[str] = []
        self._passages: list[Passage] = []
        self._starts: list[int] = []
        self._assigned = 0
        self._weight = 0
        self._composed = False
        if text or foot:
            self.append(text)
            self.finish(foot)

    def compose(self) -> list[Passage]:
        """The passages there are by now."""
        self._composed = True
        return list(self._passages)

    @property
    def blocks(self) -> list[Block]:
        """Every block, finished or not."""
        return [*self._stream.closed, *self._stream.tail]

    @property
    def codes(self) -> list[Code]:
        """The code blocks, in order."""
        found: list[Code] = []
        for block in self.blocks:
            if isinstance(block, CodePiece) and (not found or found[-1] is not block.code):
                found.append(block.code)
        return found

    def append(self, text: str) -> None:
        """More text, already `visible`; shown at the next flush."""
        self._pending.append(text)

    def flush(self) -> bool:
        """Show what was appended; whether there was anything."""
        if not self._pending:
            return False
        text = "".join(self._pending)
        self._pending.clear()
        self._stream.feed(text)
        self._assign()
        return True

    def finish(self, foot: str = "") -> None:
        """The text is complete; `foot` is a line of the app's own under it."""
        self.flush()
        self._stream.finish()
        if foot:
            self._stream.closed.append(Prose(Content.styled(visible(foot), DIM)))
        self._assign()

    def _assign(self) -> None:
        """Give every closed block to a passage and show what changed."""
        closed = self._stream.closed
        first = max(0, len(self._passages) - 1)
        for start, _ in self._stream.recoloured:
            self._assigned = min(self._assigned, len(closed))
            first = min(first, self._passage_of(start))
        self._stream.recoloured.clear()
        if not self._passages:
            self._begin_passage(0)
        for number in range(self._assigned, len(closed)):
            if self._weight >= PASSAGE_WEIGHT:
                self._begin_passage(number)
            self._weight += _weight(closed[number])
        self._assigned = len(closed)
        ends = [*self._starts[1:], len(closed)]
        for number in range(first, len(self._passages)):
            blocks = closed[self._starts[number] : ends[number]]
            if number == len(self._passages) - 1:
                blocks += self._stream.tail
            self._passages[number].show(blocks)

    def _begin_passage(self, start: int) -> None:
        passage = Passage()
        self._passages.append(passage)
        self._starts.append(start)
        self._weight = 0
        if self._composed:  # else composing will put it there
            self.mount(passage)

    def _passage_of(self, block: int) -> int:
        return max(number for number, start in enumerate(self._starts) if start <= block)


def _weight(block: Block) -> int:
    if isinstance(block, Prose):
        return 1 + len(block.content) // 60
    if isinstance(block, CodePiece):
        return 2 + block.content.plain.count("\n")
    if isinstance(block, Table):
        return 3 + len(block.rows)
    return 2
