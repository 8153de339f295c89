"""The engine's side of the chat: what is asked of it, and what its events do to the screen.

It knows no engine. The app passes it the events of engine/messages.py (`on_engine_event`) and
carries out what it asks for by message: `Ask`, `Stop`, `ClearContext`, `CountTokens`.
"""

from __future__ import annotations

import time

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.timer import Timer
from textual.widgets import TextArea

from engine import messages as wire
from tuiwork.chat.composer import Composer
from tuiwork.chat.conversation import INTERRUPTED, Turn
from tuiwork.chat.exchange import Exchange
from tuiwork.chat.gauge import gauge
from tuiwork.chat.history import History
from tuiwork.chat.library import Library
from tuiwork.chat.message_views import AnswerView, NoticeView
from tuiwork.chat.transcript import Transcript
from tuiwork.kept import KeptLines

FLUSH_S = 0.1
"""Between two flushes of a streaming answer; ten a second look like a flow."""

FLUSH_SHARE = 0.2
"""Most of the time that flushes may take: a slow one postpones the next."""

STATUS_S = 0.5
"""Between two changes of the rate in the composer's border."""

DRAFT_PAUSE_S = 0.6
"""The draft's tokens are counted when the writer pauses, not at every key."""

PIECE_S = 2.0
"""How much of a streaming answer a crash may cost."""

ROOM_SHARE = 8
"""Dropping the oldest turns leaves at least this part (1/8) of the context for the answer."""

LAST_WORDS = 5
"""Lines of a dead engine's stderr that are shown."""


class Answering(KeptLines, Vertical):
    """Messages above, the composer below, and one answer at a time streaming in."""

    class Ask(Message, namespace="chat_pane"):
        """Have the model answer these messages."""

        def __init__(self, messages: list[dict[str, str]], *, continues: bool = False) -> None:
            super().__init__()
            self.messages = messages
            self.continues = continues
            """The last message is the beginning of the answer to be given."""

        @property
        def raw(self) -> str:
            """What a model without a chat template gets: the last words, as they are."""
            return self.messages[-1]["content"]

    class Stop(Message, namespace="chat_pane"):
        """Stop the answer."""

    class ClearContext(Message, namespace="chat_pane"):
        """Forget the conversation; the expert cache stays."""

    class CountTokens(Message, namespace="chat_pane"):
        """Count what these messages would take."""

        def __init__(self, messages: list[dict[str, str]]) -> None:
            super().__init__()
            self.messages = messages

    def __init__(self, history: History | None, id: str | None) -> None:
        super().__init__(id=id)
        self.library = Library(history, self.notice)
        self.exchange = Exchange()
        self.model = "Model"
        self.ready = False
        """Whether a model is open."""
        self.opening = False
        """Whether one will be, if all goes well."""
        self.paced = False
        """Whether somebody calls `flush` in time with what else is drawn: each time that anything
        is drawn costs as much again."""
        self.held = ""
        """The message that goes out when the model is open; empty: none does."""
        self._used: int | None = None
        self._ctx: int | None = None
        self._draft: int | None = None
        self._live: AnswerView | None = None
        self._fitting = False
        self._unkept: list[str] = []
        self._kept_at = self._flush_after = self._status_at = 0.0
        self._draft_timer: Timer | None = None

    def compose(self) -> ComposeResult:
        """Messages above, the composer below."""
        yield Transcript()
        yield Composer("Write a message")

    def on_mount(self) -> None:
        """Begin idle."""
        self._pump = self.set_interval(FLUSH_S, self.flush, pause=True)
        self.show_status()

    @property
    def transcript(self) -> Transcript:
        """The messages."""
        return self.query_one(Transcript)

    @property
    def composer(self) -> Composer:
        """Where a message is written."""
        return self.query_one(Composer)

    def notice(self, text: str) -> None:
        """Tell something where the person looks."""
        self.transcript.add(NoticeView(text))
        self.transcript.text_came()

    def idle_status(self) -> str:
        """What the composer's border says when nothing is being answered."""
        return "message"

    def context_full(self, why: str) -> None:
        """The conversation does not fit any more."""
        self.notice(why)

    def ask(self, *, continues: bool = False) -> None:
        """Have the conversation answered as it stands."""
        conversation = self.library.current
        self.exchange.ask(continues=continues)
        view = AnswerView(model=self.model)
        if continues:
            view.append(conversation.reopen())
        view.number = len(conversation.turns) - continues
        self._live = view
        self.transcript.add(view)
        self.transcript.follow()
        self._draft = None
        self._kept_at = time.monotonic()
        self.show_status()
        self.post_message(self.Ask(conversation.messages(), continues=continues))

    def on_engine_event(self, event: wire.Event) -> None:
        """Take one event of the engine; those that do not concern a chat are left alone."""
        match event:
            case wire.Text():
                self._take_text(event.text)
                return
            case wire.TokenRows():
                self.exchange.tokens_came(len(event.rows))
                return
            case wire.OpenProgress():
                self.model_is_coming()
            case wire.Opened():
                self._reopening()
                self.model, self._ctx = event.info.name, event.info.ctx
                self._used, self.ready = 0, True
                self.library.use_model(self.model)
                self.model_opened()
            case wire.OpenFailed():
                self._reopening()
                self.held = ""
            case wire.PromptProgress():
                self.exchange.progress(event.stage, event.fraction)
            case wire.Finished():
                self._finished(event)
            case wire.Failed():
                self._failed(event)
            case wire.Tokens():
                self._counted(event.count, event.ctx)
            case wire.Cleared():
                self._used = 0
            case wire.EngineDied():
                self._died(event)
            case _:
                return
        self.show_status()

    def model_is_coming(self) -> None:
        """A model is being opened; what is sent until then waits for it."""
        self._reopening()
        self.opening = True

    def hold(self, text: str) -> None:
        """Send it when the model is open, unless it is changed until then."""
        self.composer.give_back(text)
        self.held = self.composer.text
        self.show_status()

    def model_opened(self) -> None:
        """Send what waited for the model."""
        if self.held and self.composer.text == self.held:
            self.composer.action_send()
        self.held = ""

    @on(TextArea.Changed)
    def _held_changed(self) -> None:
        """A message that is written on does not go out by itself."""
        if self.held and self.composer.text != self.held:
            self.held = ""
            self.show_status()

    def _reopening(self) -> None:
        """A model takes the place of the one that was open: what that was asked is over."""
        self.ready, self.opening, self._fitting = False, False, False
        self._end_answer(INTERRUPTED, {})

    def _take_text(self, text: str) -> None:
        if self._live is not None:
            self.exchange.text_came()
            self._live.append(text)
            self._unkept.append(text)
            if not self.paced:
                self._pump.resume()

    def flush(self) -> None:
        """Show what came since the last flush; pace them by what they cost."""
        now = time.monotonic()
        if self._live is None or now < self._flush_after:
            return
        if not self.query(Transcript):
            return  # the app closes while an answer comes: its widgets go before its timers
        if self._live.flush():
            self.transcript.text_came()
            self.call_after_refresh(self._flushed, now)
        if self._unkept and now - self._kept_at > PIECE_S:
            self.library.current.journal.piece("".join(self._unkept))
            self._unkept.clear()
            self._kept_at = now
        if now - self._status_at > STATUS_S:
            self._status_at = now
            self.show_status()

    def _flushed(self, began: float) -> None:
        now = time.monotonic()
        self._flush_after = now + (now - began) * (1 / FLUSH_SHARE - 1) - FLUSH_S

    def _finished(self, event: wire.Finished) -> None:
        answer = event.answer
        figures: dict[str, float] = {"n_generated": answer.n_generated}
        if answer.tok_s is not None:
            figures["tok_s"] = answer.tok_s
        self._used = event.context_used
        self._end_answer(answer.stop_reason, figures)

    def _failed(self, event: wire.Failed) -> None:
        if not self.exchange.busy:
            return  # a draft's tokens could not be counted: the gauge just does not show it
        self._used = event.context_used
        self._end_answer(INTERRUPTED, {})
        if event.error == "ContextFull":
            self.context_full(event.message)
        else:
            self.notice(f"{event.message}\nYour message is kept: Ctrl+R tries again.")

    def _died(self, event: wire.EngineDied) -> None:
        self.ready, self.opening, self._used, self._fitting = False, False, None, False
        self.held = ""
        self._end_answer(INTERRUPTED, {})
        last_words = "\n".join(event.stderr[-LAST_WORDS:])
        self.notice(
            f"{event.message} The conversation is kept; restart the engine to go on."
            + (f"\n{last_words}" if last_words else "")
        )

    def _end_answer(self, stop_reason: str, figures: dict[str, float]) -> None:
        """The exchange is over; what came of the answer stays."""
        if not self.exchange.busy:
            return
        self.exchange.end()
        self._pump.pause()
        view, self._live = self._live, None
        self._unkept.clear()
        if view is None:
            return
        if not view.raw:
            view.remove()
            return
        turn = Turn("assistant", view.raw, stop_reason, figures)
        self.library.current.answered(turn)
        view.finish(turn)
        self.transcript.text_came()

    # How full the context is.

    def show_status(self) -> None:
        """What is going on and how full the context is, in the composer's border."""
        composer = self.composer
        status = self.exchange.status() or self.idle_status()
        composer.border_title = Content(status)
        composer.border_subtitle = gauge(self._used, self._ctx, draft=self._draft)

    @on(TextArea.Changed)
    def _draft_changed(self) -> None:
        if self._draft_timer is not None:
            self._draft_timer.stop()
        self._draft_timer = self.set_timer(DRAFT_PAUSE_S, self._count_draft)

    def _count_draft(self) -> None:
        text = self.composer.text
        if self.ready and not self.exchange.busy and text.strip():
            told = self.library.current.messages()
            self.post_message(self.CountTokens([*told, {"role": "user", "content": text}]))
        elif self._draft is not None:
            self._draft = None
            self.show_status()

    def _counted(self, count: int, ctx: int) -> None:
        self._ctx = ctx
        if self._fitting:
            self._fitting = False
            if count > ctx - ctx // ROOM_SHARE:
                self.drop_oldest()
            else:
                self.transcript.mark_unsent(self.library.current.first_sent)
                self.ask(continues=self.library.current.turns[-1].role == "assistant")
        elif not self.exchange.busy and self.composer.text.strip():
            self._draft = count

    def drop_oldest(self) -> None:
        """Tell the model less, one exchange after the other, until there is room; then ask."""
        conversation = self.library.current
        if conversation.forget_oldest():
            self._fitting = True
            self.post_message(self.CountTokens(conversation.messages()))
        else:
            self.notice("This message alone does not fit. Shorten it, or raise model.ctx.")
