"""The first run: what this is, in one screen."""

from __future__ import annotations

from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from tuiwork.chat.pane import ChatPane
from tuiwork.screens.dialog import Dialog

_WHAT = (
    "A Mixture-of-Experts model has far more weights than one token needs. Here only the experts "
    "that a token is routed to are read from the model's file, so that a model bigger than your "
    "memory runs. You see which are in memory, what each read costs, and turn the knobs while "
    "the model talks."
)
_LOSSY = (
    "The workbench starts LOSSY, at drop 0.75: weak experts that are not in memory are left out, "
    "which is faster and changes answers a little. F5 down to 0 is lossless."
)
_STEPS = (
    ("type, Enter", "talk to the model; Esc stops it"),
    ("F5 F6", "drop fewer or more cold experts, and read what it bought"),
    ("F7 F8", "less or more memory for experts"),
    ("F3", "all knobs; F9 takes a change back; Alt+P saves them as a profile"),
    ("Tab, 1 … 6", "go to a panel; F2 lets it fill the screen"),
    ("Ctrl+O", "open a model"),
    ("F1", "every key; Ctrl+P finds any command by name"),
)


class WelcomeScreen(Dialog[bool]):
    """Dismissed with whether a model shall be chosen now."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "start", "Start"),
        Binding("ctrl+o", "choose", "Open a model"),
    ]

    def __init__(self, opening: str, chat: ChatPane) -> None:
        """`chat`: who does not read this but writes is writing a message there."""
        super().__init__()
        self._opening = opening
        self._chat = chat
        self._writing = False

    def compose(self) -> ComposeResult:
        """What it is, the keys that matter, what happens now."""
        with Vertical(classes="box") as box:
            box.border_title = Content("Welcome to tuiwork")
            box.border_subtitle = Content("Enter starts · Ctrl+O opens a model")
            yield Static(Text(_WHAT))
            yield Static(Text(""))
            yield Static(_step_table())
            yield Static(Text(""))
            yield Static(Text(_LOSSY))
            if self._opening:
                yield Static(Text(f"\n{self._opening}", style="italic"))

    def on_key(self, event: events.Key) -> None:
        """The first letter closes this; the rest of the same burst may still arrive here."""
        # Enter alone is not writing: it starts.
        if (event.is_printable or self._writing) and self._chat.composer.take_key(event):
            self._begin_writing()

    def on_paste(self, event: events.Paste) -> None:
        """A paste is writing, too."""
        event.stop()
        self._chat.composer.post_message(events.Paste(event.text))
        self._begin_writing()

    def _begin_writing(self) -> None:
        if not self._writing:
            self._writing = True
            self.dismiss(False)

    def action_start(self) -> None:
        """Go on."""
        self.dismiss(False)

    def action_choose(self) -> None:
        """Choose a model first."""
        self.dismiss(True)


def _step_table() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    for keys, words in _STEPS:
        table.add_row(Text(keys, style="bold"), Text(words))
    return table
