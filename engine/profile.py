"""Profiles: settings in a TOML file, read into a `RunConfig`, and changed in place.

A profile holds only what it changes; the rest are the defaults of `engine.config`. Every error is
an `InputError` that names the file, the line, the key, what was given and what is allowed.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import (
    SETTINGS,
    Problem,
    RunConfig,
    Setting,
    allowed,
    check_value,
    get,
    shown,
    validate,
)
from engine.errors import InputError
from engine.profile_paths import find_profile, profile_files
from engine.toml_lines import KeyPath, key_lines

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LARGEST_PROFILE_BYTES = 256 * 1024
"""Someone who gives the model as the profile must not wait while 20 GB are read."""

TABLES = tuple(dict.fromkeys(key.partition(".")[0] for key in SETTINGS if "." in key))

_PLACE_IN_MESSAGE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")

_NEWLINE_IN_STRING = ("Illegal character '\\n'", "a quotation mark on this line is not closed")
"""What the reader says of a text that does not end on its line, and what is meant."""


@dataclass(frozen=True)
class Origin:
    """Where a value came from: a line of a file, or what was typed."""

    text: str

    @classmethod
    def of_line(cls, path: Path, line: int | None) -> Origin:
        """A place in a profile; the whole file where the line is not known."""
        return cls(f"{path}:{line}" if line else str(path))


@dataclass(frozen=True)
class ProfileText:
    """A profile that was read and checked key by key."""

    path: Path
    values: dict[str, Any]
    """Typed values by dotted key, as in `stream.cache-mb`."""
    origins: dict[str, Origin]


def load_profile(path_or_name: str | os.PathLike[str]) -> dict[str, Any]:
    """The settings of a profile, by dotted key. Raises InputError."""
    return read_profile(path_or_name).values


def read_profile(path_or_name: str | os.PathLike[str]) -> ProfileText:
    """The settings of a profile and where each stands. Raises InputError.

    A relative `model.path` is meant from the profile's own folder, so that a profile beside its
    model works from anywhere.
    """
    path = find_profile(path_or_name)
    text = read_text(path)
    document = parse(text, path)
    lines = _lines_of(text)
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for parts, value in _flatten(document):
        origin = Origin.of_line(path, lines.get(parts))
        spec = _setting_at(parts, value, origin)
        problem = check_value(spec, value)
        if problem:
            raise InputError(f"{origin.text}: {spec.key}: {problem}")
        values[spec.key] = _typed(spec, value)
        origins[spec.key] = origin
    if values.get("model.path"):
        model = Path(values["model.path"]).expanduser()
        values["model.path"] = str(path.parent.absolute() / model)
    return ProfileText(path, values, origins)


@dataclass(frozen=True)
class ProfileEntry:
    """A profile that can be named, as a list shows it."""

    name: str
    path: Path
    shipped: bool
    description: str
    lossy: bool
    """Whether it changes what the model answers."""
    error: str = ""
    """Why it cannot be used, or empty."""


def list_profiles() -> list[ProfileEntry]:
    """The user's own profiles and the shipped ones, by name; a user's hides a shipped one."""
    entries = []
    for name, (path, shipped) in sorted(profile_files().items()):
        try:
            values = load_profile(path)
        except InputError as error:
            entries.append(ProfileEntry(name, path, shipped, "", False, str(error)))
            continue
        lossy = any(SETTINGS[key].lossy_at(value) for key, value in values.items())
        description = values.get("description", "")
        entries.append(ProfileEntry(name, path, shipped, description, lossy))
    return entries


def resolve(
    profiles: Sequence[str | os.PathLike[str]] = (),
    sets: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Defaults, then each profile, then each `key=value` of `sets`, then `flags`: later wins.

    `flags` maps dotted keys to what was typed or to typed values; None means not given. Raises
    InputError with the origin of every value that cannot be used.
    """
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for profile in profiles:
        read = read_profile(profile)
        values.update(read.values)
        origins.update(read.origins)
    for key, value in map(parse_set, sets):
        _take(values, origins, key, value, f"--set {key}")
    for key, value in (flags or {}).items():
        if value is not None:
            # A prompt is meant as it was typed, quotes included.
            is_written = isinstance(value, str) and SETTINGS[key].type is not str
            parsed = parse_value(SETTINGS[key], value) if is_written else value
            _take(values, origins, key, parsed, "--" + key.rpartition(".")[2])
    config = RunConfig().replace(values)
    problems = validate(config)
    if problems:
        raise InputError("\n".join(_explain(problem, config, origins) for problem in problems))
    return config


def parse_set(text: str) -> tuple[str, Any]:
    """`key=value` as a setting's full key and its value. Raises InputError.

    The table may be left out where the key is unique, and the quotes around a text.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise InputError(f"--set {text}: write it as key=value, for example stream.cache-mb=4000")
    key = full_key(name.strip())
    if key is None:
        raise InputError(f"--set {text}: there is no setting {name.strip()!r}{suggest(name)}")
    return key, parse_value(SETTINGS[key], value)


def full_key(name: str) -> str | None:
    """The dotted key that `name` means: itself, or the only setting with this last part."""
    name = name.replace("_", "-")
    if name in SETTINGS:
        return name
    matches = [key for key in SETTINGS if key.rpartition(".")[2] == name]
    return matches[0] if len(matches) == 1 else None


def parse_value(setting: Setting, text: str) -> Any:
    """A typed text as the value of `setting`: as TOML would read it, bare texts allowed."""
    text = text.strip()
    if check_value(setting, text) is None:
        # A text setting takes what was typed: the prompt `1984` or `true` is a text.
        quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
        if not quoted:
            return text
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return _typed(setting, document["value"]) if len(document) == 1 else text


def parse(text: str, path: Path) -> dict[str, Any]:
    """The document in `text`. Raises InputError with the line of a syntax error."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise InputError(f"{path}: is nested too deeply to be a profile") from None
    except ValueError as error:
        message = str(error)
        place = _PLACE_IN_MESSAGE.search(message)
        if place is None:
            raise InputError(f"{path}: is not valid TOML: {message}") from None
        what = message[: place.start()].replace(*_NEWLINE_IN_STRING)
        line = place[1] or str(max(1, len(text.splitlines())))
        where = f"column {place[2]}" if place[2] else "at the end of the file"
        raise InputError(f"{path}:{line}: is not valid TOML: {what} ({where})") from None


def read_text(path: Path) -> str:
    """A profile's text, its line ends as they are. Raises InputError."""
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST_PROFILE_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if raw.startswith(b"GGUF"):
        raise InputError(f"{path}: is a model, not a profile; a profile is a TOML file")
    if len(raw) > LARGEST_PROFILE_BYTES:
        limit = LARGEST_PROFILE_BYTES // 1024
        raise InputError(f"{path}: is larger than {limit} KiB, so it is no profile")
    try:
        # Some editors begin a UTF-8 file with a byte order mark, which TOML does not allow.
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{line}: is not UTF-8 text, which TOML must be") from None


def suggest(name: str) -> str:
    """`; did you mean …?` with the nearest setting, or nothing."""
    name = name.strip().replace("_", "-")
    last = name.rpartition(".")[2]
    moved = [key for key in SETTINGS if key.rpartition(".")[2] == last]
    short = {key.rpartition(".")[2]: key for key in SETTINGS}
    near = moved or difflib.get_close_matches(name, SETTINGS, n=1, cutoff=0.6)
    near = near or [short[hit] for hit in difflib.get_close_matches(last, short, n=1, cutoff=0.6)]
    return f"; did you mean {near[0]}?" if near else "; `tuiwork profiles show` lists them all"


def _take(
    values: dict[str, Any], origins: dict[str, Origin], key: str, value: Any, origin: str
) -> None:
    values[key] = value
    origins[key] = Origin(origin)


def _typed(spec: Setting, value: Any) -> Any:
    # TOML writes 1 where the setting is a fraction.
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if spec.type is float and is_whole and abs(value) < 2**53 else value


def _explain(problem: Problem, config: RunConfig, origins: Mapping[str, Origin]) -> str:
    origin = origins.get(problem.key)
    place = origin.text if origin else "settings"
    # What was typed names its setting already.
    head = place if place.startswith("--") else f"{place}: {problem.key}"
    notes = [
        f" ({key} = {shown(get(config, key))} is from {origins[key].text})"
        for key in problem.because
        if key in origins
    ]
    return f"{head}: {problem.message}{''.join(notes)}"


def _lines_of(text: str) -> dict[KeyPath, int]:
    try:
        return key_lines(text)
    except (ValueError, RecursionError):
        return {}


def _flatten(document: Mapping[str, Any]) -> Iterable[tuple[KeyPath, Any]]:
    """Every key that should be a setting: those at the top, and those in a known table."""
    for name, value in document.items():
        if name in TABLES and isinstance(value, dict):
            for inner, inner_value in value.items():
                yield (name, inner), inner_value
        else:
            yield (name,), value


def _setting_at(parts: KeyPath, value: Any, origin: Origin) -> Setting:
    key = ".".join(parts)
    spec = SETTINGS.get(key)
    if spec is not None and "." not in parts[-1]:
        return spec
    if parts[0] in TABLES and len(parts) == 1:
        raise InputError(
            f"{origin.text}: {key}: {shown(value)} is not a table; "
            f"write [{key}] on a line of its own, and its settings below"
        )
    if isinstance(value, dict) and len(parts) == 1:
        near = difflib.get_close_matches(key, TABLES, n=1)
        hint = f"did you mean [{near[0]}]? " if near else ""
        known = ", ".join(f"[{table}]" for table in TABLES)
        raise InputError(f"{origin.text}: there is no table [{key}]; {hint}Tables are {known}")
    where = f" in [{parts[0]}]" if len(parts) > 1 else ""
    raise InputError(f"{origin.text}: there is no setting {parts[-1]!r}{where}{suggest(key)}")


def describe(key: str) -> str:
    """One line of help for a setting: what it means and what it accepts."""
    spec = SETTINGS[key]
    return f"{spec.doc} ({allowed(spec)})"
