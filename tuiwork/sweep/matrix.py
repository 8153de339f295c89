"""A sweep as people write it, in a TOML file or as flags, made into a plan.

Every error is an InputError that says where (file and line, or which flag), what was given and
what is allowed.
"""

from __future__ import annotations

import difflib
import itertools
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.config import SETTINGS, RunConfig, check_value, get, shown
from engine.errors import InputError
from engine.machine_state import CoolDown
from engine.profile import TABLES, full_key, parse, parse_value, read_text, resolve, suggest
from engine.profile_paths import find_profile
from engine.toml_lines import KeyPath, key_lines
from tuiwork.sweep.plan import Arm, Plan

MOST_CELLS = 10_000
"""More would run for weeks: more likely a slip of the matrix."""

MOST_ROUNDS = 1000

Combination = dict[str, Any]

_KEYS = ("description", "model", "profiles", "prompts", "rounds", "settings", "matrix", "cool-down")
_OWN_KEYS = frozenset(_KEYS) - {"description", "model"}
"""What no profile has at its top."""

_COOL_DOWN = {
    "max-temperature": "max_temperature_c",
    "max-load": "max_load",
    "min-available-mb": "min_available_mib",
    "give-up-after": "give_up_s",
}


@dataclass
class Wishes:
    """What a sweep shall run, before it is resolved. Later parts override earlier ones."""

    description: str = ""
    model: str | None = None
    profiles: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    rounds: int = 2
    settings: dict[str, Any] = field(default_factory=dict)
    """The same in every arm, by dotted key."""
    matrices: list[dict[str, list[Any]]] = field(default_factory=list)
    """Each stands for every combination of its keys' values."""
    cool_down: dict[str, float] = field(default_factory=dict)


def is_sweep_file(path: Path) -> bool:
    """Whether a TOML file describes a sweep, not a profile. Raises InputError for no TOML file."""
    document = parse(read_text(path), path)
    return bool(_OWN_KEYS & document.keys()) or isinstance(document.get("model"), str)


def read_sweep(path: Path) -> Wishes:
    """The sweep that a TOML file describes. Raises InputError."""
    text = read_text(path)
    return _Reader(path, parse(text, path), text).wishes()


def parse_vary(text: str) -> tuple[str, list[Any]]:
    """`key=a,b,c` as a setting's dotted key and its values. Raises InputError."""
    name, equals, values = text.partition("=")
    if not equals or not name.strip() or not values.strip():
        raise InputError(f"--vary {text}: write it as key=value,value, as in cache-mb=1500,4000")
    key = _key(name.strip(), f"--vary {text}")
    listed = [parse_value(SETTINGS[key], value) for value in values.split(",")]
    return key, _checked(key, listed, f"--vary {text}")


def parse_cool_down(text: str) -> tuple[str, float]:
    """`condition=number` as a field of CoolDown and its value. Raises InputError."""
    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(
            f"--cool-down {text}: write it as condition=number; conditions are "
            f"{', '.join(_COOL_DOWN)}"
        )
    try:
        number: Any = float(value)
    except ValueError:
        number = value
    return _cool_down(name.strip(), number, f"--cool-down {text}")


def make_arms(wishes: Wishes, base: Sequence[str] = ()) -> list[Arm]:
    """Every combination of settings. Raises InputError for one that could not run.

    `base` are profiles below every arm's own. An arm's `model.path` may be empty.
    """
    arms: list[Arm] = []
    for profile, combination in itertools.product(wishes.profiles or [""], _combinations(wishes)):
        letter = _letter(len(arms))
        config = _resolved(wishes, base, profile, combination)
        settings = {key: get(config, key) for key in SETTINGS}
        name = Path(profile).stem if profile else ""
        arms.append(Arm(letter, name, combination, settings))
    return arms


def make_plan(wishes: Wishes, arms: Sequence[Arm]) -> Plan:
    """The plan for some wishes and their arms. Raises InputError for what could not run."""
    prompts = prompts_of(wishes, arms)
    cells = len(arms) * len(prompts) * wishes.rounds
    if cells > MOST_CELLS:
        raise InputError(f"this sweep has {cells} cells; at most {MOST_CELLS} are allowed")
    return Plan(
        arms=tuple(arms),
        prompts=prompts,
        rounds=wishes.rounds,
        cool_down=CoolDown(**wishes.cool_down),
        description=wishes.description,
        models={path: _file_mark(path) for path in {str(a.settings["model.path"]) for a in arms}},
    )


def _combinations(wishes: Wishes) -> Iterator[Combination]:
    for matrix in wishes.matrices or [{}]:
        for values in itertools.product(*matrix.values()):
            yield dict(zip(matrix, values, strict=True))


def _resolved(
    wishes: Wishes, base: Sequence[str], profile: str, combination: Combination
) -> RunConfig:
    flags = {"model.path": wishes.model, **wishes.settings, **combination}
    try:
        return resolve([*base, *([profile] if profile else [])], [], flags)
    except InputError as error:
        words = ", ".join(f"{key}={shown(value)}" for key, value in combination.items())
        raise InputError(f"{error} (in the combination {words})" if words else str(error)) from None


def prompts_of(wishes: Wishes, arms: Sequence[Arm]) -> tuple[str, ...]:
    """What is asked: the prompts wished for, or the one that every arm's profile has.

    Raises InputError if there is none.
    """
    if wishes.prompts:
        return tuple(wishes.prompts)
    found = {str(arm.settings["run.prompt"]) for arm in arms}
    if len(found) > 1 or not "".join(found).strip():
        raise InputError(
            "give a prompt: -p TEXT, or prompts = […] in the sweep file"
            + ("; the profiles have different ones" if len(found) > 1 else "")
        )
    return tuple(found)


def _file_mark(path: str) -> tuple[int, int]:
    try:
        status = Path(path).stat()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{path}: the model cannot be read: {reason}") from None
    return status.st_size, status.st_mtime_ns


def _letter(number: int) -> str:
    letters = string.ascii_uppercase
    head, last = divmod(number, len(letters))
    return (_letter(head - 1) if head else "") + letters[last]


def _key(name: str, where: str) -> str:
    key = full_key(name)
    if key is None:
        raise InputError(f"{where}: there is no setting {name!r}{suggest(name)}")
    if key in ("model.path", "run.prompt", "description"):
        raise InputError(f"{where}: {key} is not varied here; a sweep has one model, and prompts")
    return key


def _checked(key: str, values: Sequence[Any], where: str) -> list[Any]:
    spec = SETTINGS[key]
    for value in values:
        problem = check_value(spec, value)
        if problem:
            raise InputError(f"{where}: {key}: {problem}")
    return [float(v) if spec.type is float and isinstance(v, int) else v for v in values]


def _cool_down(name: str, value: Any, where: str) -> tuple[str, float]:
    if name not in _COOL_DOWN:
        near = difflib.get_close_matches(name, _COOL_DOWN, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(_COOL_DOWN)}"
        raise InputError(f"{where}: there is no condition {name!r}{hint}")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value < 1e9:
        raise InputError(f"{where}: {name} is {shown(value)}, not a number from 0 on")
    return _COOL_DOWN[name], float(value)


class _Reader:
    """Reads one sweep file, and knows the line of each of its keys."""

    def __init__(self, path: Path, document: Mapping[str, Any], text: str) -> None:
        self._path = path
        self._document = document
        try:
            self._lines: dict[KeyPath, int] = key_lines(text)
        except (ValueError, RecursionError):
            self._lines = {}

    def wishes(self) -> Wishes:
        for key, value in self._document.items():
            if key not in _KEYS:
                raise InputError(f"{self._where(key)}: {self._unknown(key, value)}")
        return Wishes(
            description=self._text("description"),
            model=self._path_from_here(self._text("model")),
            profiles=[self._profile(name) for name in self._texts("profiles")],
            prompts=list(self._prompts()),
            rounds=self._rounds(),
            settings={
                key: _checked(key, [value], where)[0]
                for key, value, where in self._settings("settings", self._table("settings"))
            },
            matrices=[self._matrix(table) for table in self._matrix_tables()],
            cool_down=dict(
                _cool_down(key, value, self._where("cool-down", key))
                for key, value in self._table("cool-down").items()
            ),
        )

    def _where(self, *keys: str) -> str:
        line = self._lines.get(keys)
        return f"{self._path}:{line}" if line else str(self._path)

    def _unknown(self, key: str, value: Any) -> str:
        near = difflib.get_close_matches(key, _KEYS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        if key in TABLES and isinstance(value, dict):
            hint = "settings of every run go below [settings], those to vary below [matrix]. "
        return f"a sweep has no {key!r}; {hint}It has {', '.join(_KEYS)}"

    def _text(self, key: str) -> str:
        value = self._document.get(key, "")
        if not isinstance(value, str) or "\0" in value:
            raise InputError(f"{self._where(key)}: {key} is {shown(value)}, not a text")
        return value

    def _texts(self, key: str) -> list[str]:
        values = self._document.get(key, [])
        if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
            raise InputError(f"{self._where(key)}: {key} is {shown(values)}, not a list of texts")
        return values

    def _table(self, key: str) -> Mapping[str, Any]:
        value = self._document.get(key, {})
        if not isinstance(value, dict):
            raise InputError(f"{self._where(key)}: write [{key}] on a line of its own")
        return value

    def _rounds(self) -> int:
        value = self._document.get("rounds", Wishes.rounds)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not 1 <= value <= MOST_ROUNDS:
            raise InputError(
                f"{self._where('rounds')}: rounds is {shown(value)}, not a whole number from 1 to "
                f"{MOST_ROUNDS}"
            )
        return int(value)

    def _path_from_here(self, text: str) -> str | None:
        """A path in the file is meant from the file's own folder."""
        return str(self._path.parent.absolute() / Path(text).expanduser()) if text else None

    def _profile(self, name: str) -> str:
        """A profile's name as it is; a file is meant from the sweep file's folder."""
        beside = self._path.parent / Path(name).expanduser()
        return str(beside) if beside.is_file() else str(find_profile(name))

    def _prompts(self) -> Iterator[str]:
        listed = self._document.get("prompts", [])
        where = self._where("prompts")
        if not isinstance(listed, list):
            raise InputError(f"{where}: prompts is {shown(listed)}, not a list")
        for prompt in listed:
            if isinstance(prompt, dict) and prompt.keys() == {"file"}:
                text = read_prompt(self._path.parent / str(prompt["file"]), where)
            elif isinstance(prompt, str):
                text = prompt
            else:
                raise InputError(
                    f'{where}: a prompt is {shown(prompt)}; allowed is a text, or {{ file = "…" }}'
                )
            yield check_prompt(text, where)

    def _matrix_tables(self) -> list[Mapping[str, Any]]:
        value = self._document.get("matrix", [])
        tables = value if isinstance(value, list) else [value]
        if not all(isinstance(table, dict) for table in tables):
            raise InputError(
                f"{self._where('matrix')}: write [matrix] on a line of its own, and below it "
                "a list of values for each setting"
            )
        return tables

    def _matrix(self, table: Mapping[str, Any]) -> dict[str, list[Any]]:
        matrix: dict[str, list[Any]] = {}
        for key, values, where in self._settings("matrix", table):
            if not isinstance(values, list) or not values:
                raise InputError(f"{where}: {key} is {shown(values)}, not a list of values to try")
            matrix[key] = _checked(key, values, where)
        return matrix

    def _settings(self, name: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
        """A table's settings: dotted key, value, and where it stands; tables of settings too."""
        for key, value in table.items():
            if key in TABLES and isinstance(value, dict):
                for inner, inner_value in value.items():
                    where = self._where(name, key, inner)
                    yield _key(f"{key}.{inner}", where), inner_value, where
            else:
                where = self._where(name, key)
                yield _key(key, where), value, where


def read_prompt(path: Path, where: str) -> str:
    """A prompt from a file. Raises InputError."""
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{where}: {path}: is not text in UTF-8") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{where}: {path}: cannot be read: {reason}") from None


def check_prompt(text: str, where: str) -> str:
    """The prompt, if it can be asked. Raises InputError."""
    if not text.strip():
        raise InputError(f"{where}: a prompt is empty: give a text to answer")
    if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
        raise InputError(f"{where}: a prompt is not a text in UTF-8")
    return text
