"""Where a message is written: several lines, a history of what was sent, large pastes."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.widgets import TextArea

from tuiwork.chat.untrusted import LineEnds, without_unseen
from tuiwork.kept import KeptLines

MOST_REMEMBERED = 200
LONGEST_MESSAGE = 2_000_000
"""Characters; no context holds more, and wrapping more would hold up the screen."""


class Composer(KeptLines, TextArea):
    """The message being written."""

    DEFAULT_CSS = """
    Composer {
        height: auto; min-height: 3; max-height: 10;
        border: round $surface-lighten-3; padding: 0 1; background: $background;
        scrollbar-size-vertical: 1;
        border-title-color: $text-muted; border-subtitle-color: $text-muted;
        &:focus { border: round $primary; border-title-color: $text-primary; }
        &.-editing { border: round $warning; border-title-color: $text-warning; }
    }
    """
    # Enter must be asked for before the text area takes it. Terminals that cannot tell
    # Shift+Enter from Enter still send Alt+Enter and Ctrl+J apart.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "send", "Send", id="chat.send", priority=True),
        Binding(
            "shift+enter,ctrl+j,alt+enter",
            "newline",
            "New line",
            id="chat.newline",
            priority=True,
            show=False,
        ),
        Binding("up", "earlier", "Earlier message", id="chat.earlier", show=False),
        Binding("down", "later", "Later message", id="chat.later", show=False),
    ]

    class Sent(Message):
        """The message is to be sent."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(self, placeholder: str = "") -> None:
        super().__init__(
            id="composer",
            placeholder=placeholder,
            soft_wrap=True,
            show_line_numbers=False,
            highlight_cursor_line=False,
            tab_behavior="focus",
        )
        self._sent: list[str] = []
        self._position = 0
        self._draft = ""

    def remember(self, texts: list[str]) -> None:
        """What Up brings back, oldest first."""
        self._sent = texts[-MOST_REMEMBERED:]
        self._position = len(self._sent)

    def put(self, text: str) -> None:
        """Make this the message, with the cursor at its end."""
        self.load_text(clean(text))
        self.move_cursor(self.document.end)

    def take_key(self, event: events.Key) -> bool:
        """Take a key that was pressed elsewhere by who is writing; whether it belongs here."""
        if event.key == "enter":
            self.action_send()
        elif event.is_printable:
            self.post_message(events.Key(event.key, event.character))
        else:
            return False
        event.stop()
        return True

    def action_send(self) -> None:
        """Send the message, unless there is none."""
        # The app looks for priority keys before the letters typed just ahead of them have arrived
        # here: a burst of text and Enter would find an empty message. So this queues up, too.
        self.call_later(self._send)

    def _send(self) -> None:
        text = self.text
        if not text.strip():
            return
        # Taken out at once: what is typed from here on is another message.
        if not self._sent or self._sent[-1] != text:
            self._sent = [*self._sent, text][-MOST_REMEMBERED:]
        self._position, self._draft = len(self._sent), ""
        self.load_text("")
        self.post_message(self.Sent(text))

    def give_back(self, text: str) -> None:
        """The message could not be sent: it stands here again, before what was typed since."""
        if self._sent and self._sent[-1] == text:
            self._sent.pop()
        self._position = len(self._sent)
        self.put(text + self.text)

    def action_newline(self) -> None:
        """Begin another line."""
        self.call_later(self.insert, "\n")

    def action_earlier(self) -> None:
        """On the first line: the message sent before; elsewhere a line up."""
        if not self.cursor_at_first_line or not self._sent or self._position == 0:
            self.action_cursor_up()
            return
        if self._position == len(self._sent):
            self._draft = self.text
        self._position -= 1
        self.put(self._sent[self._position])

    def action_later(self) -> None:
        """On the last line: the message sent after; elsewhere a line down."""
        if not self.cursor_at_last_line or self._position == len(self._sent):
            self.action_cursor_down()
            return
        self._position += 1
        at_end = self._position == len(self._sent)
        self.put(self._draft if at_end else self._sent[self._position])

    async def _on_paste(self, event: events.Paste) -> None:
        """Paste any amount; what a terminal would obey is shown instead."""
        event.stop()
        event.prevent_default()
        text = clean(event.text)
        if len(text) > LONGEST_MESSAGE:
            text = text[:LONGEST_MESSAGE]
            self.notify(
                f"Only the first {LONGEST_MESSAGE:,} characters were pasted.", severity="warning"
            )
        self.insert(text)

    def title(self, text: str) -> None:
        """What stands in the upper border."""
        self.border_title = Content(text)


def clean(text: str) -> str:
    """Text as it may stand in the composer."""
    ends = LineEnds()
    return without_unseen((ends.feed(text) + ends.finish()).replace("\r", "\n"))
