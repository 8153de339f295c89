"""Where the keys of a TOML document stand, so that an error can name its line.

The readers (tomllib, tomli) keep no positions and tomlkit keeps them to itself. This scanner only
reads documents that one of them has accepted, so it checks nothing: it steps over values and notes
keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable

KeyPath = tuple[str, ...]

_BLANK = re.compile(r"[ \t]*")
_BETWEEN = re.compile(r"(?:[ \t\r\n,]|#[^\n]*)*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_BASIC_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_LITERAL_STRING = re.compile(r"'[^']*'")
# Up to two quotes may stand right before the closing three.
_LONG_BASIC = re.compile(r'"""(?:[^"\\]|\\.|"{1,2}(?!"))*"{3,5}', re.DOTALL)
_LONG_LITERAL = re.compile(r"'''(?:[^']|'{1,2}(?!'))*'{3,5}", re.DOTALL)
_SCALAR = re.compile(r"[^,\]}#\r\n]+")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|(.))")
_SHORT_ESCAPES = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", "e": "\x1b"}


def key_lines(text: str) -> dict[KeyPath, int]:
    """The line, counted from 1, where each key and table of a valid document first appears.

    A key is the tuple of its parts: `[stream]` and `cache-mb = 0` give `("stream",)` and
    `("stream", "cache-mb")`. Tables in an array of tables share one path.
    """
    scanner = _Scanner(text)
    scanner.document()
    return scanner.lines


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.line = 1
        self.line_counted_to = 0
        self.lines: dict[KeyPath, int] = {}

    def document(self) -> None:
        table: KeyPath = ()
        while self._skip(_BETWEEN) < len(self.text):
            if self._next("["):
                self._next("[")
                table = self._key(())
                self._next("]")
                self._next("]")
            else:
                self._pair(table)

    def _pair(self, table: KeyPath) -> None:
        key = self._key(table)
        self._next("=")
        self._skip(_BLANK)
        self._value(key)

    def _key(self, table: KeyPath) -> KeyPath:
        """Read a dotted key below `table`, and note every part of it that is new."""
        path = table
        while True:
            self._skip(_BLANK)
            self.line += self.text.count("\n", self.line_counted_to, self.at)
            self.line_counted_to = self.at
            path = (*path, self._key_part())
            self.lines.setdefault(path, self.line)
            self._skip(_BLANK)
            if not self._next("."):
                return path

    def _key_part(self) -> str:
        if self.text.startswith('"', self.at):
            return _ESCAPE.sub(_unescape, self._take(_BASIC_STRING)[1:-1])
        if self.text.startswith("'", self.at):
            return self._take(_LITERAL_STRING)[1:-1]
        return self._take(_BARE_KEY)

    def _value(self, key: KeyPath) -> None:
        for opening, pattern in (
            ('"""', _LONG_BASIC),
            ("'''", _LONG_LITERAL),
            ('"', _BASIC_STRING),
            ("'", _LITERAL_STRING),
        ):
            if self.text.startswith(opening, self.at):
                self._take(pattern)
                return
        if self._next("["):
            self._until("]", lambda: self._value(key))
        elif self._next("{"):
            self._until("}", lambda: self._pair(key))
        else:
            self._take(_SCALAR)

    def _until(self, closing: str, item: Callable[[], None]) -> None:
        self._skip(_BETWEEN)
        while not self._next(closing):
            item()
            self._skip(_BETWEEN)

    def _next(self, mark: str) -> bool:
        """Step over `mark` if it stands here."""
        found = self.text.startswith(mark, self.at)
        self.at += len(mark) if found else 0
        return found

    def _skip(self, pattern: re.Pattern[str]) -> int:
        match = pattern.match(self.text, self.at)
        self.at = match.end() if match else self.at
        return self.at

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        if not match:
            raise ValueError(f"this is not TOML at character {self.at}")
        self.at = match.end()
        return match[0]


def _unescape(match: re.Match[str]) -> str:
    short, long, byte, letter = match.groups()
    code = short or long or byte
    return chr(int(code, 16)) if code else _SHORT_ESCAPES.get(letter, letter)
