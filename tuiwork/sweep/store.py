"""A sweep's folder: what is in it, and how it stays right whenever the power goes.

    plan.json            what the sweep runs; the folder belongs to this plan
    profiles/A.toml      each arm's settings, as its runs are given them
    cells/r1-p1-A/       one finished cell: tokens.csv, run.json, cell.json, resolved.toml
    failed/r1-p1-A.json  why a cell failed; it is tried again when the sweep is resumed
    report.md, report.html, plots/
    lock                 held by whoever works here, and by the runs that it starts

A cell appears by one rename, when all its files are on the disk: it is there whole or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import InputError
from engine.whole_file import sync_folder, write_whole
from tuiwork.sweep.plan import Cell, Plan
from tuiwork.text import one_line

TOKENS, ANSWER, RECORD, RESOLVED = "tokens.csv", "run.json", "cell.json", "resolved.toml"

_OWN_NAMES = frozenset({"cells", "failed", "profiles", "lock"})
"""What a folder may hold whose sweep was killed before it had a plan."""

_UNFINISHED = "."
"""How the folders of cells that are not finished begin."""

_PROBE_BYTES = 16 << 10
_ORPHAN_PATIENCE_S = 10.0


@dataclass(frozen=True)
class FinishedCell:
    """A cell that ran."""

    cell: Cell
    folder: Path
    record: dict[str, Any]
    """How it ran: start, duration, the machine's state."""


class Store:
    """The folder of a sweep."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock_fd = -1

    @property
    def cells_folder(self) -> Path:
        """Where finished cells are."""
        return self.folder / "cells"

    def prepare(self) -> None:
        """Make the folder and what is always in it. Raises InputError."""
        try:
            others = (
                {path.name for path in self.folder.iterdir()} if self.folder.exists() else set()
            )
            if others - _OWN_NAMES and "plan.json" not in others:
                raise InputError(
                    f"{self.folder}: holds other files and is no sweep's folder; give another "
                    "with --out"
                )
            for name in ("cells", "failed", "profiles"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
            self.probe()
        except OSError as error:
            raise InputError(
                f"{self.folder}: a sweep cannot be kept there: {error.strerror}; "
                "give another folder with --out"
            ) from None

    def probe(self) -> None:
        """Raise OSError if the folder cannot take some more data."""
        path = self.folder / ".probe"
        try:
            write_whole(path, bytes(_PROBE_BYTES))
        finally:
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep others out. Raises InputError if another sweep is at work here.

        The runs of a sweep inherit the lock, so that none is started beside one whose sweep was
        killed.
        """
        handle = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._take(handle)
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
            self.lock_fd = handle
            yield
        finally:
            self.lock_fd = -1
            os.close(handle)

    def _take(self, handle: int) -> None:
        until = time.monotonic() + _ORPHAN_PATIENCE_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                if time.monotonic() > until:
                    number = os.pread(handle, 32, 0).decode("ascii", "replace").strip() or "?"
                    raise InputError(
                        f"{self.folder}: another sweep (process {number}), or a run that it "
                        "started, is at work there; wait for its end, or give another --out"
                    ) from None
            time.sleep(0.1)

    def plan(self) -> Plan | None:
        """The plan that the folder belongs to, or None for a new folder. Raises InputError."""
        path = self.folder / "plan.json"
        if not path.exists():
            return None
        try:
            return Plan.from_document(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path}: is not the plan of a sweep that can go on: {error}"
            ) from None

    def adopt(self, plan: Plan) -> None:
        """Make the folder this plan's, and throw away what a killed sweep left.

        Raises InputError if it is another plan's, or a model is not the one that the sweep began
        with; OSError if it cannot be written.
        """
        before = self.plan()
        if before is not None and before.models != plan.models and before.arms == plan.arms:
            raise InputError(
                f"{self.folder}: its sweep began with another state of the model "
                f"({', '.join(plan.models)}); give another folder with --out"
            )
        if before is not None and before != plan:
            raise InputError(
                f"{self.folder}: belongs to another sweep. Go on with that by --resume "
                f"{self.folder}, or give another folder with --out"
            )
        self._clear()
        if before is None:
            write_whole(self.folder / "plan.json", _json(plan.document()))
        self._write_profiles(plan)

    def _clear(self) -> None:
        for left in self.cells_folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(left, ignore_errors=True)
        for left in self.folder.glob(".*"):
            # A file that was being written.
            if left.is_file():
                left.unlink(missing_ok=True)

    def _write_profiles(self, plan: Plan) -> None:
        import tomlkit

        for arm in plan.arms:
            head = f"# Arm {arm.letter} of this sweep: {one_line(arm.name)}\n"
            text = head + tomlkit.dumps(arm.profile_document)
            path = self.folder / "profiles" / f"{arm.letter}.toml"
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                write_whole(path, text)

    def finished(self, plan: Plan) -> list[FinishedCell]:
        """The cells that ran, in the plan's order. Raises InputError for one that is damaged."""
        found = []
        for cell in plan.cells:
            folder = self.cells_folder / cell.id
            if folder.is_dir():
                found.append(FinishedCell(cell, folder, self._record(folder)))
        return found

    def _record(self, folder: Path) -> dict[str, Any]:
        try:
            record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
            if not isinstance(record, dict):
                raise ValueError("is not a table")
            return record
        except (OSError, ValueError) as error:
            raise InputError(
                f"{folder}: is damaged ({error}); delete the folder, and the cell runs again"
            ) from None

    def work_folder(self, cell: Cell) -> Path:
        """An empty folder for a cell while it runs. Raises OSError."""
        folder = self.cells_folder / f"{_UNFINISHED}work-{cell.id}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def finish(self, cell: Cell, files: Mapping[str, bytes]) -> None:
        """Keep a cell that ran, all of it at once. Raises OSError, and then keeps none of it."""
        new = self.cells_folder / f"{_UNFINISHED}new-{cell.id}"
        shutil.rmtree(new, ignore_errors=True)
        try:
            new.mkdir()
            for name, content in files.items():
                write_whole(new / name, content)
            new.rename(self.cells_folder / cell.id)
        except OSError:
            shutil.rmtree(new, ignore_errors=True)
            raise
        sync_folder(self.cells_folder)
        self._failure_file(cell).unlink(missing_ok=True)

    def fail(self, cell: Cell, reason: str) -> None:
        """Note why a cell failed. Raises OSError."""
        write_whole(self._failure_file(cell), _json({"cell": cell.id, "reason": reason}))

    def failures(self, plan: Plan) -> dict[str, str]:
        """Why cells failed, by their ids."""
        found = {}
        for cell in plan.cells:
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                text = self._failure_file(cell).read_text(encoding="utf-8")
                found[cell.id] = str(json.loads(text)["reason"])
        return found

    def _failure_file(self, cell: Cell) -> Path:
        return self.folder / "failed" / f"{cell.id}.json"


def _json(document: Any) -> str:
    return json.dumps(document, indent=1, ensure_ascii=True) + "\n"
