"""Jobs that lanes do only when there is nothing else to do, and that can be taken back until then.

There may be thousands of them, so nothing here looks through them: a lane takes the next one, and
whoever needs a certain one takes it by itself, at the same cost however many there are.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

_T = TypeVar("_T")

_LOOK_S = 0.0002
"""How often a pause looks whether the lanes have ended what they do."""


class Background(Generic[_T]):
    """A queue whose jobs lanes take by turns. Safe between threads without a lock.

    A set's `remove` succeeds for one thread only: whoever removes a job from `_open` has it.
    """

    def __init__(self, n_lanes: int) -> None:
        self._queue: deque[_T] = deque()
        self._open: set[_T] = set()
        self._at_work = bytearray(n_lanes)
        """By lane: 1 while it has a job of this queue, or looks for one."""
        self._paused = False
        self.yields = False
        """Whether something is waited for now, which such reads would only delay."""

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, jobs: Iterable[_T]) -> None:
        """Put jobs at the end."""
        jobs = list(jobs)
        self._open.update(jobs)
        self._queue.extend(jobs)

    def take_back(self, job: _T) -> bool:
        """Have a job out of the queue; False if a lane has begun it, or it was never in it."""
        try:
            self._open.remove(job)
        except KeyError:
            return False
        return True

    def next(self, lane: int) -> _T | None:
        """The next job for a lane, which says `done` when it has done it."""
        self._at_work[lane] = 1
        # Looked at after `_at_work` is set: `pause` sets and looks the other way round.
        while not (self._paused or self.yields):
            try:
                job = self._queue.popleft()
            except IndexError:
                break
            if self.take_back(job):
                return job
        self._at_work[lane] = 0
        return None

    def done(self, lane: int) -> None:
        """The lane has done what it took."""
        self._at_work[lane] = 0

    def pause(self) -> None:
        """Let no lane take a job, and return when none has one."""
        self._paused = True
        while 1 in self._at_work:
            time.sleep(_LOOK_S)

    def resume(self) -> None:
        """Let lanes take jobs again."""
        self._paused = False

    def clear(self) -> None:
        """Forget all that was not begun."""
        self._open.clear()
        self._queue.clear()
