"""One turn on the screen: who spoke, the words, and under an answer what it cost."""

from __future__ import annotations

import time
from itertools import pairwise

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Static

from tuiwork.chat.blocks import Code
from tuiwork.chat.conversation import Turn
from tuiwork.chat.parsing import ACCENT
from tuiwork.chat.passage import Body
from tuiwork.chat.reasoning import ReasoningSplitter
from tuiwork.chat.untrusted import LineEnds, visible
from tuiwork.chat.when import per_second, seconds
from tuiwork.kept import KeptLines

FOLDED, UNFOLDED = "▸", "▾"
_STOP_WORDS = {
    "cancelled": "stopped",
    "length": "cut at the length limit",
    "context": "context is full",
    "interrupted": "interrupted",
}


class MessageView(KeptLines, Vertical):
    """What user and answer views share: a mark on the left, and that they can be picked."""

    DEFAULT_CSS = """
    MessageView {
        height: auto;
        padding: 0 1 0 1;
        margin: 0 0 1 0;
        border-left: outer $surface-lighten-2;
        &.-picked { border-left: outer $accent; background: $boost; }
        &.-unsent { opacity: 60%; }
        .message--who { text-style: bold; color: $text-muted; height: 1; }
    }
    """

    class Picked(Message):
        """Somebody clicked the message."""

        def __init__(self, view: MessageView) -> None:
            super().__init__()
            self.view = view

    number = 0
    """The turn's place in the conversation."""

    @property
    def text(self) -> str:
        """What a copy of the message gives: what can be seen, as Markdown."""
        raise NotImplementedError

    def on_click(self, event: events.Click) -> None:
        """Pick it."""
        self.post_message(self.Picked(self))


class UserView(MessageView):
    """What the person said, exactly: no Markdown, no markup."""

    DEFAULT_CSS = """
    UserView { border-left: outer $primary; }
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = visible(text)

    @property
    def text(self) -> str:
        """The words, control characters made visible."""
        return self._text

    def compose(self) -> ComposeResult:
        """A head and the words, in one widget: a long conversation has many of these."""
        yield Static(Content.assemble(("You", f"bold {ACCENT}"), "\n", self._text))


class NoticeView(Static):
    """Something the app has to say where the person looks: an error and what to do."""

    DEFAULT_CSS = """
    NoticeView {
        height: auto; margin: 0 0 1 0; padding: 0 1;
        border-left: outer $error; color: $text-error; background: $error 10%;
    }
    """

    def __init__(self, text: str) -> None:
        super().__init__(Content(visible(text)))


class ReasoningView(KeptLines, Vertical):
    """What the model thought aloud; one line when folded."""

    DEFAULT_CSS = """
    ReasoningView {
        height: auto; margin: 0 0 1 0;
        .reasoning--head { color: $text-muted; text-style: italic; height: 1; }
        .reasoning--head:hover { background: $boost; }
        Body { color: $text-muted; margin: 0 0 0 2; }
        &.-folded Body { display: none; }
    }
    """

    clock = staticmethod(time.monotonic)

    def __init__(self, text: str = "") -> None:
        """`text` is the whole of it, already `visible`; empty: it is still to come."""
        super().__init__(classes="-folded" if text else "")
        self._body = Body(text)
        self._head = Static("", classes="reasoning--head", markup=False)
        self._words = words_begun(" " + text)
        self._last = " "
        self._began = self.clock()
        self._took_s: float | None = None
        self._ended = bool(text)
        self._chosen = False

    @property
    def folded(self) -> bool:
        """Whether only the head line shows."""
        return self.has_class("-folded")

    def compose(self) -> ComposeResult:
        """A head to click, and the reasoning."""
        yield self._head
        yield self._body

    def on_mount(self) -> None:
        """Show the head."""
        self._show_head()

    def append(self, text: str) -> None:
        """More reasoning, already `visible`."""
        self._words += words_begun(self._last + text)
        self._last = text[-1]
        self._body.append(text)

    def flush(self) -> bool:
        """Show what was appended."""
        changed = self._body.flush()
        if changed:
            self._show_head()
        return changed

    def end(self) -> None:
        """The answer begins: fold, unless the reader decided otherwise."""
        if self._ended:
            return
        self._ended = True
        self._took_s = self.clock() - self._began
        self._body.finish()
        if not self._chosen:
            self.add_class("-folded")
        self._show_head()

    def toggle(self) -> None:
        """Fold or unfold, by the reader's wish."""
        self._chosen = True
        self.toggle_class("-folded")
        self._show_head()

    def on_click(self, event: events.Click) -> None:
        """The head line folds and unfolds."""
        if event.widget is self._head:
            event.stop()
            self.toggle()

    def _show_head(self) -> None:
        mark = FOLDED if self.folded else UNFOLDED
        verb = "Thought" if self._ended else "Thinking"
        took = f" for {seconds(self._took_s)}" if self._took_s is not None else ""
        text = f"{mark} {verb}{took} · {self._words} words"
        self._head.update(Content(text))


class AnswerView(MessageView):
    """The model's answer, streaming or whole."""

    def __init__(self, turn: Turn | None = None, *, model: str = "Model") -> None:
        super().__init__()
        self._model = visible(model)
        self._splitter = ReasoningSplitter()
        self._line_ends = LineEnds()
        self._raw: list[str] = []
        self._said: list[str] = []
        self._reasoning: ReasoningView | None = None
        self._body = Body()
        if turn is not None:
            reasoning, answer = self._split(turn.text)
            self._reasoning = ReasoningView(reasoning) if reasoning else None
            self._body = Body(answer, foot=foot_line(turn))

    @property
    def raw(self) -> str:
        """The answer as the model gave it, reasoning marks and all."""
        return "".join(self._raw)

    @property
    def text(self) -> str:
        """The answer without the reasoning, control characters made visible."""
        return "".join(self._said)

    @property
    def codes(self) -> list[Code]:
        """The answer's code blocks, in order."""
        return self._body.codes

    @property
    def reasoning(self) -> ReasoningView | None:
        """The part that can be folded, if there is any."""
        return self._reasoning

    def compose(self) -> ComposeResult:
        """Head, reasoning, words and figures."""
        yield Static(Content(self._model), classes="message--who")
        if self._reasoning is not None:
            yield self._reasoning
        yield self._body

    def append(self, text: str) -> None:
        """More of the answer, as it came; shown at the next flush."""
        self._raw.append(text)
        self._take(*self._splitter.feed(self._line_ends.feed(text)))

    def flush(self) -> bool:
        """Show what was appended; whether there was anything."""
        changed = self._body.flush()
        if self._reasoning is not None:
            changed = self._reasoning.flush() or changed
        return changed

    def finish(self, turn: Turn) -> None:
        """The answer is complete as `turn`."""
        self._take(*self._splitter.feed(self._line_ends.finish()))
        self._take(*self._splitter.finish())
        if self._reasoning is not None:
            self._reasoning.end()
        self._body.finish(foot_line(turn))

    def _take(self, reasoning: str, answer: str) -> None:
        if reasoning:
            if self._reasoning is None:
                self._reasoning = ReasoningView()
                if self._body.is_attached:  # else composing will put it there
                    self.mount(self._reasoning, before=self._body)
            self._reasoning.append(visible(reasoning))
        if answer:
            if self._reasoning is not None:
                self._reasoning.end()
            self._said.append(visible(answer))
            self._body.append(self._said[-1])

    def _split(self, raw: str) -> tuple[str, str]:
        self._raw.append(raw)
        ends = LineEnds()
        text = ends.feed(raw) + ends.finish()
        parts = (self._splitter.feed(text), self._splitter.finish())
        reasoning, answer = ("".join(column) for column in zip(*parts, strict=True))
        self._said.append(visible(answer))
        return visible(reasoning), self._said[-1]


def words_begun(text: str) -> int:
    """Words that begin behind the first character of `text`; suits pieces of a stream."""
    return sum(before.isspace() and not after.isspace() for before, after in pairwise(text))


def foot_line(turn: Turn) -> str:
    """An answer's figures in one line: tokens, rate, and why it ended if not by itself."""
    parts = []
    n_tokens = turn.figures.get("n_generated")
    if n_tokens is not None:
        parts.append(f"{n_tokens:.0f} tokens")
    rate = turn.figures.get("tok_s")
    if rate is not None:
        parts.append(per_second(rate))
    if turn.stop_reason in _STOP_WORDS:
        parts.append(_STOP_WORDS[turn.stop_reason])
    return " · ".join(parts)
