"""The chat's small questions: a text to edit, a yes or no, and what to do when the context is full.

Each is a modal screen that gives its answer, or None if it was left with Esc.
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, Static, TextArea

from tuiwork.chat.untrusted import visible


class WhenFull(Enum):
    """What to do about a full context."""

    NEW = "new"
    DROP_OLDEST = "drop"
    CANCEL = "cancel"


_FRAME = """
    align: center middle; background: $background 60%;
    .dialog {
        width: 72; max-width: 94%; height: auto; max-height: 90%;
        border: round $primary; background: $surface; padding: 1 2;
        border-title-color: $text-primary; border-title-style: bold;
    }
    .dialog-text { height: auto; margin: 0 0 1 0; }
    .dialog-keys { height: auto; color: $text-muted; margin: 1 0 0 0; }
    .dialog-buttons { height: auto; }
    .dialog-buttons Button { margin: 0 2 0 0; min-width: 12; height: 3; }
    .dialog-buttons Button:focus { text-style: bold; background: $primary; color: $text; }
    TextArea { height: 8; border: round $foreground 25%; background: $surface; }
    TextArea:focus { border: round $primary; }
    TextArea.-short { height: 3; }
"""


class EditText(ModalScreen[str | None]):
    """Edit a text of some lines: the system prompt, a title."""

    DEFAULT_CSS = f"EditText {{ {_FRAME} }}"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+s,f2", "save", "Save", priority=True),
        Binding("escape", "leave", "Cancel"),
    ]

    def __init__(self, title: str, text: str, explanation: str, *, one_line: bool = False) -> None:
        super().__init__()
        self._title = title
        self._text = text
        self._explanation = explanation
        self._one_line = one_line

    def compose(self) -> ComposeResult:
        """The explanation, the text, and its keys."""
        with Vertical(classes="dialog") as dialog:
            dialog.border_title = Content(self._title)
            yield Static(Content(self._explanation), classes="dialog-text")
            yield TextArea(
                visible(self._text),
                classes="-short" if self._one_line else "",
                tab_behavior="focus",
                highlight_cursor_line=False,
            )
            keys = "Enter saves" if self._one_line else "Ctrl+S or F2 saves"
            yield Static(Content(f"{keys} · Esc leaves it as it was"), classes="dialog-keys")

    def on_mount(self) -> None:
        """Begin at the end of the text."""
        area = self.query_one(TextArea)
        area.move_cursor(area.document.end)
        area.focus()
        if self._one_line:
            self._bindings.bind("enter", "save", "Save", priority=True)

    def action_save(self) -> None:
        """Give the text back, with all that was typed before the key."""
        self.query_one(TextArea).call_later(self._save)

    def _save(self) -> None:
        text = self.query_one(TextArea).text
        self.dismiss(" ".join(text.split()) if self._one_line else text.strip())

    def action_leave(self) -> None:
        """Change nothing."""
        self.dismiss(None)


class Confirm(ModalScreen[bool]):
    """Ask before something that cannot be undone."""

    DEFAULT_CSS = f"Confirm {{ {_FRAME} }}"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape", "answer(False)", "No"),
        Binding("left", "app.focus_previous", show=False),
        Binding("right", "app.focus_next", show=False),
    ]

    def __init__(self, title: str, question: str, yes: str) -> None:
        super().__init__()
        self._title = title
        self._question = question
        self._yes = yes

    def compose(self) -> ComposeResult:
        """The question and two buttons; the harmless one has the focus."""
        with Vertical(classes="dialog") as dialog:
            dialog.border_title = Content(self._title)
            yield Static(Content(visible(self._question)), classes="dialog-text")
            with Horizontal(classes="dialog-buttons"):
                yield Button("Keep (n)", id="no")
                yield Button(Content(f"{self._yes} (y)"), id="yes", variant="error")

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """A button is an answer."""
        self.dismiss(event.button.id == "yes")

    def action_answer(self, answer: bool) -> None:
        """A key is one, too."""
        self.dismiss(answer)


class ContextFullDialog(ModalScreen[WhenFull]):
    """The context is full: three ways on."""

    DEFAULT_CSS = f"ContextFullDialog {{ {_FRAME} }}"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("d", f"choose('{WhenFull.DROP_OLDEST.value}')", "Drop the oldest"),
        Binding("n", f"choose('{WhenFull.NEW.value}')", "New conversation"),
        Binding("escape", f"choose('{WhenFull.CANCEL.value}')", "Cancel"),
        Binding("left", "app.focus_previous", show=False),
        Binding("right", "app.focus_next", show=False),
    ]

    def __init__(self, why: str) -> None:
        super().__init__()
        self._why = why

    def compose(self) -> ComposeResult:
        """Why, and what each way means."""
        with Vertical(classes="dialog") as dialog:
            dialog.border_title = Content("The context is full")
            text = (
                f"{visible(self._why)}\n\n"
                "Drop the oldest: the model is no longer told the first messages; you still "
                "see them.\nNew conversation: begin again with this message; the old one is "
                "kept.\nCancel: your message goes back to where you wrote it."
            )
            yield Static(Content(text), classes="dialog-text")
            with Horizontal(classes="dialog-buttons"):
                yield Button("Drop oldest (d)", id=WhenFull.DROP_OLDEST.value)
                yield Button("New (n)", id=WhenFull.NEW.value)
                yield Button("Cancel (Esc)", id=WhenFull.CANCEL.value)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """A button is a choice."""
        self.action_choose(event.button.id or WhenFull.CANCEL.value)

    def action_choose(self, choice: str) -> None:
        """Give the choice back."""
        self.dismiss(WhenFull(choice))
