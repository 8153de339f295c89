"""The scroll of messages: follows the newest text, but never pulls a reader away."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Static

from tuiwork.chat import clipboard
from tuiwork.chat.blocks import DIM
from tuiwork.chat.message_views import AnswerView, MessageView, NoticeView
from tuiwork.chat.passage import Passage
from tuiwork.chat.when import counted
from tuiwork.kept import KeptLines

PICKED = "-picked"
HINTS = "c copy · b code · e edit · r again · n go on · t thinking · Esc back"
_KEYS = (
    ("Enter", "send"),
    ("Shift+Enter", "new line (or Alt+Enter, Ctrl+J)"),
    ("Esc", "stop the answer"),
    ("Alt+Up", "pick a message: copy, edit, answer again"),
    ("Ctrl+N", "new conversation"),
    ("Ctrl+L", "earlier conversations"),
    ("Ctrl+P", "everything else"),
)
WELCOME = Content.assemble(
    ("A new conversation\n", "bold"),
    *(part for key, what in _KEYS for part in ((f"\n{key:<13}", "$text-primary"), (what, DIM))),
)


class Transcript(KeptLines, Vertical):
    """Messages, the line that tells of new text below, and which message is picked."""

    DEFAULT_CSS = """
    Transcript {
        height: 1fr; layers: base over;
        Earlier { height: 1; margin: 0 0 1 1; color: $text-muted; display: none; }
        Earlier:hover { color: $text; }
        &.-earlier Earlier { display: block; }
        #welcome { width: auto; height: auto; margin: 1 2; }
        &.-some #welcome { display: none; }
        #below {
            layer: over; dock: bottom; width: auto; height: 1; display: none;
            background: $accent; color: $text; padding: 0 1; offset-x: 1;
        }
        &.-below #below { display: block; }
    }
    """

    class Picked(Message):
        """Another message is picked, or none."""

    _code_view: MessageView | None = None
    _code_number = 0

    def compose(self) -> ComposeResult:
        """The scroll, and the hint over its last line."""
        with Scroll(id="scroll"), Messages(id="messages"):
            yield Static(WELCOME, id="welcome")
            yield Earlier(id="earlier")
        yield Static(Content("↓ new text below (End)"), id="below")

    @property
    def view(self) -> Scroll:
        """The scrolling part."""
        return self.query_one("#scroll", Scroll)

    @property
    def views(self) -> list[MessageView]:
        """The messages, oldest first."""
        return list(self._messages.query_children(MessageView).results(MessageView))

    @property
    def picked(self) -> MessageView | None:
        """The message that keys work on."""
        return next((view for view in self.views if view.has_class(PICKED)), None)

    def add(self, widget: Widget) -> None:
        """Put a message or notice at the end."""
        self.add_class("-some")
        self._messages.mount(widget)

    @property
    def picked_or_last(self) -> MessageView | None:
        """The message that keys work on when none was picked, too."""
        views = self.views
        return self.picked or (views[-1] if views else None)

    def pick(self, view: MessageView | None) -> None:
        """Make keys work on this message."""
        for other in self.views:
            other.set_class(other is view, PICKED)
        if view is not None:
            view.scroll_visible(animate=False)
        self.post_message(self.Picked())

    def pick_by(self, step: int) -> None:
        """Pick the next (1) or previous (-1) message."""
        views = self.views
        if not views:
            return
        picked = self.picked
        if picked is None:
            self.pick(views[-1])
            return
        self.pick(views[max(0, min(len(views) - 1, views.index(picked) + step))])

    def cut(self, keep: int) -> None:
        """Take away the messages of all turns after the first `keep`, and notices among them."""
        gone = keep == 0
        for child in list(self._messages.children):
            gone = gone or (isinstance(child, MessageView) and child.number >= keep)
            if gone and isinstance(child, (MessageView, NoticeView)):
                child.remove()
        self.set_class(keep > 0, "-some")

    def add_earlier(self, views: list[MessageView]) -> None:
        """Put messages before all others, and keep the reader where they are."""
        if not views:
            return
        shown = self.views
        self._messages.mount_all(views, before=shown[0] if shown else None)
        self.call_after_refresh(lambda: views[-1].scroll_visible(animate=False))

    def leave_before(self, first: int) -> None:
        """Take the turns before `first` off the screen: every one makes a flush dearer."""
        for view in self.views:
            if view.number < first:
                view.remove()

    def show_earlier(self, count: int) -> None:
        """Say how many messages there are above the first that is shown."""
        self.set_class(count > 0, "-earlier")
        text = f"··· {counted(count, 'earlier message')}: click, or press p"
        self.query_one(Earlier).update(Content(text))

    def mark_unsent(self, first: int) -> None:
        """Show that the model is no longer told the turns before `first`."""
        for view in self.views:
            view.set_class(view.number < first, "-unsent")

    def fold(self) -> None:
        """Fold or unfold the reasoning of the picked or last answer."""
        view = self.picked_or_last
        if isinstance(view, AnswerView) and view.reasoning is not None:
            view.reasoning.toggle()

    def copy(self, text: str, what: str) -> None:
        """Copy and say so."""
        clipboard.copy(self.app, text)
        self.notify(f"Copied the {what}: {len(text):,} characters.")

    def copy_message(self) -> None:
        """Copy the picked or last message."""
        view = self.picked_or_last
        if view is not None:
            self.copy(view.text, "message")

    def copy_next_code(self) -> None:
        """Copy a code block of the picked or last answer; the next one each time."""
        view = self.picked_or_last
        codes = view.codes if isinstance(view, AnswerView) else []
        if not codes:
            self.notify("There is no code block in this message.")
            return
        number = self._code_number if view is self._code_view else 0
        self._code_view, self._code_number = view, (number + 1) % len(codes)
        self.copy(codes[number].source, f"code block {number + 1} of {len(codes)}")

    @on(Passage.CodeClicked)
    def _code_clicked(self, event: Passage.CodeClicked) -> None:
        event.stop()
        self.copy(event.code.source, "code block")

    @on(MessageView.Picked)
    def _view_clicked(self, event: MessageView.Picked) -> None:
        event.stop()
        self.pick(event.view)

    def on_scroll_wish(self, event: Scroll.Wish) -> None:
        """What needs no engine is done here; the rest is the pane's."""
        match event.what:
            case "copy":
                self.copy_message()
            case "copy_code":
                self.copy_next_code()
            case "thinking":
                self.fold()
            case _:
                return
        event.stop()

    @property
    def _messages(self) -> Vertical:
        return self.query_one("#messages", Vertical)

    def text_came(self) -> None:
        """New text was shown; tell the reader if it is out of sight."""
        self.call_after_refresh(self._show_hint)

    def _show_hint(self) -> None:
        self.set_class(not self.view.follows, "-below")

    def follow(self) -> None:
        """Go to the newest text and stay there."""
        self.view.anchor()
        self.remove_class("-below")

    def on_scroll_moved(self) -> None:
        """The reader came back to the end."""
        if self.view.follows:
            self.remove_class("-below")

    def on_click(self) -> None:
        """The hint leads to the end."""
        if self.has_class("-below") and self.query_one("#below").mouse_hover:
            self.follow()


class Messages(KeptLines, Vertical):
    """The messages themselves."""


class Earlier(Static):
    """The line above the first message that is shown."""

    def on_click(self) -> None:
        """Show more."""
        self.post_message(Scroll.Wish("earlier"))


class Scroll(KeptLines, VerticalScroll):
    """The scroll itself; keys pick messages."""

    DEFAULT_CSS = """
    Scroll { height: 1fr; padding: 0 1 0 0; scrollbar-size-vertical: 1; }
    /* An anchored scroll draws content that is shorter than itself at its bottom. */
    Scroll > #messages { height: auto; min-height: 100%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("k,alt+up", "pick(-1)", "Message up", id="chat.previous", tooltip="Pick a message"),
        Binding("j,alt+down", "pick(1)", "Message down", id="chat.next", show=False),
        Binding("c", "ask('copy')", "Copy", id="chat.copy", tooltip="Copy the picked message"),
        Binding("b", "ask('copy_code')", "Copy code", id="chat.copy-code"),
        Binding("e", "ask('edit')", "Edit", id="chat.edit", tooltip="Edit and send again"),
        Binding("r", "ask('regenerate')", "Again", id="chat.again"),
        Binding("n", "ask('continue')", "Go on", id="chat.continue"),
        Binding("p", "ask('earlier')", "Earlier", id="chat.more", show=False),
        Binding("t", "ask('thinking')", "Thinking", id="chat.thinking"),
    ]

    class Moved(Message):
        """The view moved."""

    class Wish(Message):
        """A key asked for something to be done with the picked message."""

        def __init__(self, what: str) -> None:
            super().__init__()
            self.what = what

    @property
    def follows(self) -> bool:
        """Whether the newest text is in view and stays so."""
        return self.scroll_y >= self.max_scroll_y - 1

    def on_mount(self) -> None:
        """Stay at the end until the reader scrolls away."""
        self.anchor()

    def watch_scroll_y(self, old: float, new: float) -> None:
        """Tell that the view moved."""
        super().watch_scroll_y(old, new)
        self.post_message(self.Moved())

    def action_pick(self, step: int) -> None:
        """Pick another message."""
        transcript = self.parent
        if isinstance(transcript, Transcript):
            transcript.pick_by(step)

    def action_ask(self, what: str) -> None:
        """Ask the pane to do something with the picked message."""
        self.post_message(self.Wish(what))
