"""A dialog: a box in the middle of the screen that Escape closes."""

from __future__ import annotations

from typing import ClassVar, TypeVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Static

Result = TypeVar("Result")


class Dialog(ModalScreen[Result]):
    """What dialogs have in common."""

    DEFAULT_CSS = """
    Dialog {
        align: center middle;
        background: $background 60%;
        .box {
            width: 76; max-width: 100%; height: auto; max-height: 100%;
            border: round $accent; border-title-color: $accent;
            border-subtitle-color: $foreground 60%;
            background: $surface; padding: 1 2;
        }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Close", id="dialog.close"),
    ]

    def action_leave(self) -> None:
        """Close without a result."""
        self.dismiss(None)


class TextDialog(Dialog[str]):
    """Asks for one line of text; dismissed with it, or None."""

    def __init__(self, title: str, explanation: str, text: str = "") -> None:
        super().__init__()
        self._title = title
        self._explanation = explanation
        self._text = text

    def compose(self) -> ComposeResult:
        """The explanation and the line."""
        with Vertical(classes="box") as box:
            box.border_title = Content(self._title)
            box.border_subtitle = Content("Enter takes it, Esc does not")
            yield Static(Content(self._explanation))
            yield Input(self._text)

    def on_mount(self) -> None:
        """Typing replaces what stands there."""
        self.query_one(Input).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Take the line."""
        event.stop()
        self.dismiss(event.value)
