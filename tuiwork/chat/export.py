"""A conversation as a Markdown document."""

from __future__ import annotations

from pathlib import Path

from tuiwork.chat.conversation import Conversation
from tuiwork.chat.history import HistoryError
from tuiwork.chat.untrusted import visible


def as_markdown(conversation: Conversation, model: str = "") -> str:
    """A conversation as a document; what a terminal would obey is made visible."""
    parts = [f"# {conversation.title or 'Conversation'}"]
    if conversation.system:
        parts.append(f"> System: {conversation.system}".replace("\n", "\n> "))
    for turn in conversation.turns:
        parts.append(f"## {'You' if turn.role == 'user' else model or 'Model'}")
        parts.append(turn.said.strip())
    return visible("\n\n".join(parts)) + "\n"


def export(conversation: Conversation, folder: Path, model: str = "") -> Path:
    """Write a conversation as Markdown into `folder`, under a name that is free there.

    Raises HistoryError.
    """
    words = "".join(c if c.isalnum() else "-" for c in conversation.title.lower())
    stem = "-".join(filter(None, words.split("-")))[:50] or "conversation"
    text = as_markdown(conversation, model)
    for number in range(1, 1000):
        path = folder / (f"{stem}.md" if number == 1 else f"{stem}-{number}.md")
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            continue
        except OSError as error:
            raise HistoryError(f"{path}: cannot be written: {error.strerror}") from None
        return path
    raise HistoryError(f"{folder}: there are already 999 files named like {stem}.md")
