"""Runs what a sweep's folder still lacks, one cell after the other or on a Dask cluster."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

import tomlkit

from engine.errors import TuiworkError
from tuiwork import console
from tuiwork.progress import ProgressBar
from tuiwork.sweep.cell import Order, Outcome, Stop, execute, total_seconds
from tuiwork.sweep.forecast import Forecast
from tuiwork.sweep.plan import Cell, Plan
from tuiwork.sweep.store import Store
from tuiwork.tables import number
from tuiwork.text import one_line
from tuiwork.time_left import spoken

if TYPE_CHECKING:
    from tuiwork.sweep.farm import Farm


MOST_FAILURES = 5
"""Cells that fail in a row before a sweep gives up: probably all would."""


@dataclass(frozen=True)
class Result:
    """How far a sweep got."""

    done: int
    failed: int
    total: int
    stopped: bool
    """Whether it was asked to stop."""
    trouble: str = ""
    """Why it could not go on, or empty."""


class Runner:
    """Runs a plan's cells in its folder."""

    def __init__(self, plan: Plan, store: Store) -> None:
        self._plan = plan
        self._store = store
        self._stop = Stop()
        finished = store.finished(plan)
        done = {found.cell.id for found in finished}
        self.left = [cell for cell in plan.cells if cell.id not in done]
        self._forecast = Forecast(
            self.left, [(found.cell, total_seconds(found.record)) for found in finished]
        )
        self._done = len(finished)
        self._failed = self._failed_in_a_row = 0

    def run(self, farm: Farm | None = None) -> Result:
        """Run what is left. Finished cells are kept whatever happens."""
        trouble = ""
        try:
            with _interrupts(self._stop), ProgressBar() as bar:
                if farm is None:
                    self._run_here(bar)
                else:
                    self._run_there(farm, bar)
        except OSError as error:
            trouble = error.strerror or str(error)
        except _NoUse as error:
            trouble = str(error)
        total = len(self._plan.cells)
        return Result(self._done, self._failed, total, self._stop.pressed, trouble)

    def _run_here(self, bar: ProgressBar) -> None:
        for cell in self.left:
            folder = self._store.work_folder(cell)
            try:
                outcome = execute(
                    self._order(cell),
                    folder,
                    stop=self._stop,
                    keep_fds=(self._store.lock_fd,),
                    waiting=self._watcher(bar, cell),
                )
                # Before the cell's files go: with them gone, a full disk would not show.
                self._take(cell, outcome, bar)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            if self._stop.pressed:
                return

    def _run_there(self, farm: Farm, bar: ProgressBar) -> None:
        self._forecast.at_once = max(1, farm.workers)
        by_id = {cell.id: cell for cell in self.left}
        orders = [self._order(cell) for cell in self.left]
        for outcome in farm.run(orders, self._stop, self._watcher(bar, None)):
            self._take(by_id[outcome.id], outcome, bar)

    def _order(self, cell: Cell) -> Order:
        profile = tomlkit.dumps(cell.arm.profile_document)
        prompt = self._plan.prompts[cell.prompt - 1]
        return Order(cell.id, profile, prompt, self._plan.cool_down, self._forecast.at_once)

    def _watcher(self, bar: ProgressBar, cell: Cell | None) -> Callable[[str], None]:
        """What shows the progress while a cell runs, or the cluster's do."""

        def watch(waiting_for: str) -> None:
            what = f"cell {cell.id}" if cell is not None else "cells on the cluster"
            if waiting_for:
                what += f" waits: {waiting_for}"
            left = self._forecast.left_s()
            total = len(self._plan.cells)
            words = f"{self._done} of {total} done, {what}"
            if left is not None:
                words += f", {spoken(left)} left"
            bar(words, self._done / total)

        return watch

    def _take(self, cell: Cell, outcome: Outcome, bar: ProgressBar) -> None:
        """Keep what came of a cell, and tell it."""
        if outcome.stopped:
            return
        if outcome.failure:
            bar.close()
            console.note(f"{cell.id} ({one_line(cell.arm.name)}) failed: {outcome.failure}")
            if outcome.record_failed:
                raise _NoUse(outcome.failure)
            self._store.probe()
            self._store.fail(cell, outcome.failure)
            self._failed += 1
            self._failed_in_a_row += 1
            self._forecast.drop(cell)
            if self._failed_in_a_row >= MOST_FAILURES:
                raise _NoUse(f"{MOST_FAILURES} cells failed one after the other: {outcome.failure}")
            return
        self._store.finish(cell, outcome.files)
        self._done += 1
        self._failed_in_a_row = 0
        self._forecast.finish(cell, outcome.seconds)
        bar.close()
        console.note(self._line(cell, outcome))

    def _line(self, cell: Cell, outcome: Outcome) -> str:
        place = f"[{self._done + self._failed}/{len(self._plan.cells)}]"
        words = f"{place} {cell.id}  {one_line(cell.arm.name)}: "
        words += f"{number(outcome.tok_s, 2)} tok/s, {spoken(outcome.seconds)}"
        left = self._forecast.left_s()
        return words if not left else f"{words}; about {spoken(left)} left"


class _NoUse(TuiworkError):
    """Going on would fail all the same."""


@contextmanager
def _interrupts(stop: Stop) -> Iterator[None]:
    """Let Ctrl-C, and a polite request to end, end the current cell and nothing else."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def press(_signal: int, _frame: FrameType | None) -> None:
        stop.press()

    before = {number: signal.signal(number, press) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
