"""Writing to the person's terminal, or to whatever stands in its place.

Answers and results go to stdout, notes and progress to stderr. Everything is sanitized here, and
nothing is ever read as markup. A document of `--json` is the exception: its own escaping is enough.
"""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Any, TextIO, cast

from tuiwork.text import sanitize


def prepare_streams() -> None:
    """Make the standard streams usable whatever they are: closed, or in an old encoding."""
    for name, mode in (("stdout", "w"), ("stderr", "w"), ("stdin", "r")):
        if getattr(sys, name) is None:
            setattr(sys, name, _nothing(mode))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def write(text: str) -> None:
    """Put a piece of untrusted text on stdout at once."""
    sys.stdout.write(sanitize(text))
    sys.stdout.flush()


def say(line: str = "") -> None:
    """One line of a result, on stdout."""
    sys.stdout.write(sanitize(line) + "\n")


def note(line: str) -> None:
    """One line of comment, on stderr."""
    # What was said on stdout stands before it where both are one terminal.
    sys.stdout.flush()
    sys.stderr.write(sanitize(line) + "\n")
    sys.stderr.flush()


def write_json(document: Any) -> None:
    """One JSON document on stdout.

    Pure ASCII: a terminal may act on controls above U+007F, which JSON leaves as they are.
    """
    sys.stdout.write(json.dumps(_plain(document), indent=2, ensure_ascii=True) + "\n")
    sys.stdout.flush()


def table(rows: list[tuple[str, str]], indent: str = "") -> None:
    """Two columns on stdout: a name and what it is; the second may have several lines."""
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        first, *more = value.split("\n")
        say(f"{indent}{name:<{width}}  {first}".rstrip())
        for line in more:
            say(f"{indent}{'':<{width}}  {line}")


def silence_stdout() -> None:
    """Nobody reads stdout any more: keep Python from complaining when it flushes at exit."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):
        sys.stdout = _nothing("w")
    finally:
        os.close(devnull)


def _nothing(mode: str) -> TextIO:
    # Stands for a standard stream, so it stays open.
    return cast(TextIO, open(os.devnull, mode, encoding="utf-8"))


def _plain(value: Any) -> Any:
    """`value` with only what JSON has: not-a-number becomes null, paths become texts."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):  # a numpy scalar
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    return str(value)
