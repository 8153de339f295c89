"""`tuiwork profiles`: which there are, what one sets, and whether a file is a good one."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App

from engine.config import SETTINGS, get, shown
from engine.errors import InputError
from engine.profile import list_profiles, read_profile, resolve
from engine.profile_paths import user_profiles_dir
from tuiwork import console
from tuiwork.settings import switch
from tuiwork.text import one_line

AsJson = Annotated[bool, switch("one JSON document on stdout")]

profiles_app = App(
    name="profiles",
    help="List, show and check profiles (TOML files of settings).",
    help_format="plaintext",
)


@profiles_app.default
@profiles_app.command(name="list")
def list_() -> int:
    """Every profile that --profile knows by name."""
    entries = list_profiles()
    rows = []
    for entry in entries:
        what = f"cannot be used: {entry.error}" if entry.error else entry.description
        rows.append((entry.name, one_line(what if entry.shipped else f"(yours) {what}")))
    console.table(rows)
    console.note(f"Your own go into {user_profiles_dir()}")
    return 0


@profiles_app.command
def show(name: str = "default", /, *, json: AsJson = False) -> int:
    """Every setting under a profile: its value, where it is from, and what it means.

    Parameters
    ----------
    name
        a profile's name or its file; without one: the defaults
    """
    read = read_profile(name)
    config = resolve([name])
    if json:
        console.write_json(
            {"path": read.path, "settings": {key: get(config, key) for key in SETTINGS}}
        )
        return 0
    console.say(f"{read.path}")
    console.say(one_line(config.description))
    table = ""
    for key, spec in SETTINGS.items():
        part, dot, name = key.rpartition(".")
        if not dot:
            continue
        if part != table:
            console.say(f"\n[{part}]")
            table = part
        mark = "*" if key in read.values else " "
        console.say(f"{mark} {name:<18} {_toml(get(config, key)):<12} {spec.doc}")
    console.say("\n* set by this profile; all others are defaults")
    return 0


@profiles_app.command
def check(*files: str) -> int:
    """Whether profiles can be used; says what is wrong and where.

    Parameters
    ----------
    files
        profiles, by name or file
    """
    if not files:
        raise InputError("profiles check: give at least one profile's name or file")
    problems = 0
    for file in files:
        try:
            resolve([file])
        except InputError as error:
            problems += 1
            console.note(str(error))
        else:
            console.say(f"{file}: good")
    return 2 if problems else 0


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return shown(value).replace("'", '"') if isinstance(value, str) else shown(value)
