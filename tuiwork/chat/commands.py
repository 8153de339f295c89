"""What can be done in the chat, by name, for the command palette."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from textual.app import SystemCommand

if TYPE_CHECKING:
    from tuiwork.chat.pane import ChatPane


def commands_of(pane: ChatPane) -> Iterator[SystemCommand]:
    """Every action of the pane."""
    for title, text, action in (
        ("Chat: new conversation", "Begin again; this one is kept", pane.action_new),
        ("Chat: conversations", "Search, resume, rename, delete, export", pane.action_history),
        ("Chat: answer again", "Take the last answer back", pane.action_regenerate),
        ("Chat: go on", "Continue the last answer where it ended", pane.action_continue),
        ("Chat: stop", "Stop the answer", pane.action_stop),
        ("Chat: edit message", "Change your last message and send it again", pane.action_edit),
        ("Chat: system prompt", "What the model is told first", pane.action_system),
        ("Chat: name", "Give this conversation a name", pane.action_rename),
        ("Chat: export", "Write this conversation as Markdown", pane.action_export),
        ("Chat: copy answer", "Copy the picked or last message", pane.action_copy),
        ("Chat: copy code", "Copy the next code block", pane.action_copy_code),
        ("Chat: thinking", "Fold or unfold the reasoning", pane.action_thinking),
        ("Chat: messages", "Pick a message with the keyboard", pane.action_pick),
    ):
        yield SystemCommand(title, text, action)
