"""Which models a folder has: its GGUF files, the parts of a split model taken as one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SUFFIX = ".gguf"
_PART = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.IGNORECASE)
"""As engine.model_file.SHARD_NAME; that module loads llama.cpp."""


@dataclass(frozen=True)
class Found:
    """A model's file, or the first of its files."""

    path: Path
    problem: str = ""
    """Why it cannot be one, as far as its name tells."""


def models_in(
    folder: Path, *, recursive: bool, cancelled: Callable[[], bool] = lambda: False
) -> Iterator[list[Found]]:
    """The models of each folder, sorted by name, a folder at a time.

    Links to folders are not followed. Folders inside that cannot be read are passed over; raises
    OSError if `folder` itself cannot.
    """
    waiting = [folder]
    while waiting and not cancelled():
        here = waiting.pop()
        try:
            names, inside = _listed(here, recursive)
        except OSError:
            if here == folder:
                raise
            continue
        found = grouped(here, names)
        if found:
            yield found
        waiting += [here / name for name in sorted(inside, reverse=True)]


def _listed(folder: Path, recursive: bool) -> tuple[list[str], list[str]]:
    names: list[str] = []
    inside: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.lower().endswith(SUFFIX):
                names.append(entry.name)
            elif recursive and not entry.name.startswith(".") and _is_folder(entry):
                inside.append(entry.name)
    return names, inside


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def grouped(folder: Path, names: list[str]) -> list[Found]:
    """One entry per model: the later parts of a split model are not models by themselves."""
    there = set(names)
    found: list[Found] = []
    for name in sorted(names, key=str.lower):
        match = _PART.match(name)
        if not match or int(match["number"]) == 1:
            found.append(Found(folder / name))
            continue
        first = f"{match['stem']}-00001-of-{match['count']}{name[-len(SUFFIX) :]}"
        if first not in there:
            there.add(first)  # told once, however many parts are left
            part = f"part {int(match['number'])} of {int(match['count'])}"
            found.append(Found(folder / name, f"{part}; the first part, {first}, is missing"))
    return found
