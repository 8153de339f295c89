"""Changing a profile in place: comments, order and layout stay as their author wrote them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import SETTINGS, check_value
from engine.errors import InputError
from engine.profile import load_profile, parse, read_text, suggest
from engine.whole_file import write_whole

if TYPE_CHECKING:
    from tomlkit import TOMLDocument


def save_profile(path: str | os.PathLike[str], changes: Mapping[str, Any]) -> None:
    """Set dotted keys in the profile at `path`, creating it if need be; None takes a key out.

    The file is replaced in one step, so that a crash leaves the old one or the new one. Raises
    InputError and changes nothing if a key, a value or the existing file cannot be used.
    """
    # A link to a profile stays a link.
    target = Path(path).expanduser().resolve()
    for key, value in changes.items():
        _check(key, value)
    before = read_text(target) if target.exists() else ""
    if before:
        load_profile(target)
    after = edited(before, changes, target)
    replace_file(target, after)


def edited(text: str, changes: Mapping[str, Any], path: Path) -> str:
    """The profile `text` with `changes` made. Raises InputError if it is not a usable document."""
    # Imported here: reading profiles, which every start does, needs no tomlkit.
    import tomlkit

    expected = _values(parse(text, path))
    document = tomlkit.parse(text)
    for key, value in changes.items():
        _set(document, key, value)
        if value is None:
            expected.pop(key, None)
        else:
            expected[key] = value
    result = tomlkit.dumps(document)
    if _values(parse(result, path)) != expected:
        raise InputError(
            f"{path}: its layout is too unusual to be changed safely; edit it by hand "
            "or write each table once, as [table] and its settings below"
        )
    return result


def _check(key: str, value: Any) -> None:
    if key not in SETTINGS:
        raise InputError(f"there is no setting {key!r}{suggest(key)}")
    problem = None if value is None else check_value(SETTINGS[key], value)
    if problem:
        raise InputError(f"{key}: {problem}")


def _set(document: TOMLDocument, key: str, value: Any) -> None:
    import tomlkit

    table, dot, name = key.rpartition(".")
    if dot and table not in document:
        if value is None:
            return
        document[table] = tomlkit.table()
    target: Any = document[table] if dot else document
    if value is None:
        target.pop(name, None)
    else:
        target[name] = value


def _values(document: Mapping[str, Any]) -> dict[str, Any]:
    """Every value by dotted key; empty tables do not count."""
    values: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, dict):
            values.update({f"{name}.{inner}": kept for inner, kept in value.items()})
        else:
            values[name] = value
    return values


def replace_file(target: Path, text: str) -> None:
    """Write a whole file in one step, its folder too. Raises InputError; then nothing changed."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o644
        # As bytes: the line ends stay those that the document has.
        write_whole(target, text.encode(), mode=mode)
    except OSError as error:
        raise InputError(f"{target}: cannot be written: {error.strerror}") from None
