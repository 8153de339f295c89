"""Conversations on disk: one JSON Lines file each, only ever appended to.

Each line is one fact (`kind`), in the order it happened; reading replays them. So a crash costs at
most the line being written, which reading leaves out and reports, and what an edit took back is
still in the file. Files are the user's own (mode 600). Nothing here knows the screen.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from platformdirs import user_state_dir

from engine.errors import TuiworkError
from tuiwork.chat.conversation import INTERRUPTED, Conversation, Turn

SUFFIX = ".jsonl"
VERSION = 1
_SNIPPET = 60
"""Characters shown on each side of what a search found."""


class HistoryError(TuiworkError):
    """A conversation that cannot be read, written or changed."""


def default_folder() -> Path:
    """Where conversations are kept; it need not exist."""
    return Path(user_state_dir("tuiwork", appauthor=False)) / "conversations"


@dataclass(frozen=True)
class Loaded:
    """What a file holds, and what of it could not be read."""

    conversation: Conversation
    model: str
    """The model's name when it began."""
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Summary:
    """A conversation in a list."""

    path: Path
    title: str
    model: str
    n_turns: int
    changed: float
    """Seconds since the epoch."""
    snippet: str = ""
    """Around what a search found."""
    problems: tuple[str, ...] = ()


class FileJournal:
    """Appends a conversation's facts to its file, which is made with the first of them.

    A file that cannot be written is reported once, to `on_trouble`; the conversation goes on.
    """

    def __init__(self, path: Path, model: str, on_trouble: Callable[[str], None]) -> None:
        self.path = path
        self.model = model
        """The model's name, for the first line of a new file."""
        self._on_trouble = on_trouble
        self._file: IO[bytes] | None = None
        self._broken = False
        self._waiting: list[dict[str, Any]] = []

    def said(self, turn: Turn) -> None:
        """A finished turn, on the disk before this returns."""
        fact: dict[str, Any] = {"kind": turn.role, "text": turn.text, "time": _now()}
        if turn.role == "assistant":
            fact |= {"stop": turn.stop_reason, "figures": dict(turn.figures)}
        self._append(fact, sync=True)

    def piece(self, text: str) -> None:
        """A part of an answer that is still coming."""
        self._append({"kind": "piece", "text": text})

    def reopened(self) -> None:
        """The last answer goes on."""
        self._append({"kind": "reopen"})

    def cut(self, keep: int) -> None:
        """Later turns are taken back."""
        self._append({"kind": "cut", "keep": keep})

    def forgot(self, first: int) -> None:
        """Earlier turns are no longer told."""
        self._append({"kind": "forget", "first": first})

    def titled(self, title: str) -> None:
        """A new name."""
        self._append({"kind": "title", "text": title}, sync=True)

    def system_changed(self, text: str) -> None:
        """A new system prompt."""
        self._append({"kind": "system", "text": text})

    def close(self) -> None:
        """Let go of the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _append(self, fact: dict[str, Any], *, sync: bool = False) -> None:
        if self._broken:
            return
        self._waiting.append(fact)
        if self._file is None and fact["kind"] != "user" and not self.path.exists():
            return  # an unused conversation leaves no file
        try:
            file = self._opened()
            file.write(b"".join(map(_line, self._waiting)))
            self._waiting.clear()
            file.flush()
            if sync:
                os.fsync(file.fileno())
        except (OSError, HistoryError) as error:
            self._broken = True
            reason = error if isinstance(error, HistoryError) else error.strerror
            self._on_trouble(f"This conversation is no longer kept on disk: {self.path}: {reason}")

    def _opened(self) -> IO[bytes]:
        if self._file is not None:
            return self._file
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        file = os.fdopen(descriptor, "r+b", buffering=0)
        try:
            _lock(file)
            size = os.fstat(descriptor).st_size
            if size == 0:
                begin = {"kind": "begin", "version": VERSION, "model": self.model}
                file.write(_line(begin | {"time": _now()}))
            elif os.pread(descriptor, 1, size - 1) != b"\n":
                file.write(b"\n")  # a line that a crash cut short must not swallow the next
        except BaseException:
            file.close()
            raise
        self._file = file
        return file


class History:
    """The folder of conversations."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or default_folder()

    def begin(self, model: str, on_trouble: Callable[[str], None]) -> FileJournal:
        """A journal for a new conversation; nothing is written before it has something to say."""
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        name = f"{stamp}-{secrets.token_hex(3)}{SUFFIX}"
        return FileJournal(self.folder / name, model, on_trouble)

    def resume(self, path: Path, on_trouble: Callable[[str], None]) -> Loaded:
        """A conversation to go on with: what is said from now on is added to its file."""
        loaded = load(path)
        loaded.conversation.journal = FileJournal(path, loaded.model, on_trouble)
        return loaded

    def paths(self) -> list[Path]:
        """The files, the one changed last first."""
        try:
            files = [path for path in self.folder.iterdir() if path.suffix == SUFFIX]
        except OSError:
            return []
        return sorted(files, key=_changed, reverse=True)

    def summaries(self, wanted: str = "") -> Iterator[Summary]:
        """Every conversation that has `wanted` in its name or words, the newest first."""
        for path in self.paths():
            summary = summarize(path, wanted)
            if summary is not None:
                yield summary

    def rename(self, path: Path, title: str) -> None:
        """Give a conversation another name. Raises HistoryError."""
        troubles: list[str] = []
        journal = FileJournal(path, "", troubles.append)
        journal.titled(title)
        journal.close()
        if troubles:
            raise HistoryError(troubles[0])

    def delete(self, path: Path) -> None:
        """Remove a conversation for good. Raises HistoryError."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise HistoryError(f"{path}: cannot be removed: {error.strerror}") from None


def load(path: Path) -> Loaded:
    """Read one conversation. Raises HistoryError if the file cannot be opened at all."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise HistoryError(f"{path}: cannot be read: {error.strerror}") from None
    return replay(lines)


def replay(lines: Iterable[bytes]) -> Loaded:
    """A conversation from its file's lines; what cannot be understood is left out and told."""
    replayer = _Replayer()
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    for number, line in numbered:
        try:
            fact = json.loads(line)
            replayer.take(fact["kind"], fact)
        except (ValueError, KeyError, TypeError, IndexError, RecursionError):
            last = number == numbered[-1][0]
            replayer.problems.append(
                "the last line is cut short; what was said before it is complete"
                if last
                else f"line {number} cannot be read and was left out"
            )
    return replayer.finish()


class _Replayer:
    """Does again, to a conversation without a journal, what the facts say was done."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._conversation = Conversation()
        self._model = ""
        self._partial: list[str] = []
        self._reopened = False

    def take(self, kind: str, fact: dict[str, Any]) -> None:
        """Apply one fact; an impossible one raises and changes nothing."""
        conversation = self._conversation
        match kind:
            case "begin":
                self._model = _text(fact, "model")
            case "user":
                turn = Turn("user", _text(fact, "text"))
                self._keep_partial()
                conversation.turns.append(turn)
            case "assistant":
                self._answered(_answer(fact))
                self._partial.clear()
            case "piece":
                self._partial.append(_text(fact, "text"))
            case "reopen":
                self._partial = [conversation.turns[-1].text]
                self._reopened = conversation.turns[-1].role == "assistant"
            case "cut":
                keep = _count(fact, "keep")
                self._keep_partial()
                conversation.cut(keep)
            case "forget":
                first = _count(fact, "first")
                conversation.first_sent = min(first, len(conversation.turns))
            case "title":
                conversation.rename(_text(fact, "text"))
            case "system":
                conversation.system = _text(fact, "text")
            case _:
                raise ValueError(kind)

    def finish(self) -> Loaded:
        """The conversation, with an answer whose end is missing as far as it came."""
        self._keep_partial()
        return Loaded(self._conversation, self._model, tuple(self.problems))

    def _keep_partial(self) -> None:
        text = "".join(self._partial)
        self._partial.clear()
        if text:
            self._answered(Turn("assistant", text, INTERRUPTED))

    def _answered(self, turn: Turn) -> None:
        # Two answers in a row without a reopening: the line between them was lost. Keep both.
        if self._reopened:
            self._conversation.answered(turn)
        else:
            self._conversation.turns.append(turn)
        self._reopened = False


def summarize(path: Path, wanted: str = "") -> Summary | None:
    """A conversation as it is listed, or None if it does not have `wanted` in it."""
    try:
        loaded = load(path)
    except HistoryError as error:
        return None if wanted else Summary(path, path.stem, "", 0, 0.0, problems=(str(error),))
    conversation = loaded.conversation
    title = conversation.title or "(empty)"
    snippet = _found(conversation, wanted) if wanted else ""
    if wanted and not snippet and wanted.casefold() not in title.casefold():
        return None
    return Summary(
        path,
        title,
        loaded.model,
        len(conversation.turns),
        _changed(path),
        snippet,
        loaded.problems,
    )


def _line(fact: dict[str, Any]) -> bytes:
    # ASCII escapes keep any text, half surrogates too, on one line that any program can read.
    return json.dumps(fact, ensure_ascii=True).encode() + b"\n"


def _text(fact: dict[str, Any], key: str) -> str:
    value = fact[key]
    if not isinstance(value, str):
        raise ValueError(key)
    return value


def _count(fact: dict[str, Any], key: str) -> int:
    value = fact[key]
    if not isinstance(value, int) or value < 0:
        raise ValueError(key)
    return value


def _answer(fact: dict[str, Any]) -> Turn:
    figures = fact.get("figures")
    numbers = {
        str(name): float(value)
        for name, value in (figures.items() if isinstance(figures, dict) else ())
        if isinstance(value, (int, float))
    }
    return Turn("assistant", _text(fact, "text"), str(fact.get("stop", "")), numbers)


def _found(conversation: Conversation, wanted: str) -> str:
    """The words around the first place that has `wanted`, on one line; empty if none has."""
    needle = wanted.casefold()
    for turn in conversation.turns:
        text = " ".join(turn.said.split())
        at = text.casefold().find(needle)
        if at >= 0:
            start, end = max(0, at - _SNIPPET), at + len(wanted) + _SNIPPET
            return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")
    return ""


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _lock(file: IO[bytes]) -> None:
    """Two programs writing one conversation would mix their turns."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise HistoryError("another tuiwork has this conversation open") from None
    except OSError:
        return  # a filesystem without locks: better kept than locked
