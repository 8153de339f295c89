"""The conversation that is open, and the others on disk; without a history, just the open one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tuiwork.chat.conversation import Conversation
from tuiwork.chat.history import FileJournal, History, Loaded


class Library:
    """Opens one conversation at a time and lets go of the one before."""

    def __init__(self, history: History | None, on_trouble: Callable[[str], None]) -> None:
        self.history = history
        """None keeps nothing."""
        self.current = Conversation()
        self._on_trouble = on_trouble
        self._journal: FileJournal | None = None
        self._model = ""

    @property
    def path(self) -> Path | None:
        """The file of the open conversation; it is there once something was said."""
        return self._journal.path if self._journal else None

    def use_model(self, name: str) -> None:
        """The model that conversations are begun with from now on."""
        self._model = name
        if self._journal is not None and not self.current.turns:
            self._journal.model = name

    def new(self, system: str) -> Conversation:
        """Begin a conversation."""
        self.close()
        if self.history is not None:
            self._journal = self.history.begin(self._model, self._on_trouble)
        self.current = Conversation(self._journal)
        self.current.set_system(system)
        return self.current

    def resume(self, path: Path) -> Loaded:
        """Go on with a kept conversation. Raises HistoryError, and then all is as before."""
        assert self.history is not None
        loaded = self.history.resume(path, self._on_trouble)
        self.close()
        journal = loaded.conversation.journal
        self._journal = journal if isinstance(journal, FileJournal) else None
        self.current = loaded.conversation
        return loaded

    def rename(self, path: Path, title: str) -> None:
        """Give a kept conversation, or the open one, another name. Raises HistoryError."""
        if path == self.path:
            self.current.rename(title)
        elif self.history is not None:
            self.history.rename(path, title)

    def delete(self, path: Path) -> None:
        """Remove a kept conversation for good. Raises HistoryError."""
        if self.history is not None:
            self.history.delete(path)

    def close(self) -> None:
        """Let go of the open conversation's file."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None
