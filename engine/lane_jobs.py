"""What lanes do, as values: reads, moves and releases of memory, and how each went."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple


class Release(NamedTuple):
    """Pages to give back to the system; no read of the same call touches them."""

    shard: int
    first: int
    last: int
    core_first: int = 0
    core_bytes: int = 0
    """The part of them that may be moved instead; none if it has no bytes."""


class Move(NamedTuple):
    """Memory of a release that a read takes over: the release's core goes to `target`."""

    release: Release
    target: int
    """Offset in the read's shard."""


class Read(NamedTuple):
    """One read: file range to address range. Offsets and lengths are page multiples."""

    shard: int
    first: int
    last: int
    tag: object
    """What is read, for errors and traces; None for dense weights."""
    move: Move | None = None
    """Done first, so that the read goes into memory that is there already."""
    ahead: bool = False
    """Whether it was begun before it was known to be needed."""
    warm: bool = False
    """Whether a warm start asked for it, and no token."""


class ReadOutcome(NamedTuple):
    """How one read went."""

    read: Read
    lane: int
    nbytes: int
    latency_ns: int
    error: OSError | None


Work = Read | Release | Callable[[], None]
"""What a lane does; a call is some thinking for the callback's thread while that computes."""


class Job:
    """Work for a lane, and how it went once it is done."""

    __slots__ = ("done", "failure", "outcome", "report", "wanted", "work")

    def __init__(self, work: Work, report: deque[Job] | None = None) -> None:
        """`report`: where the job puts itself as soon as its outcome is known."""
        self.work = work
        self.report = report
        self.done = False
        self.wanted = False
        """Whether the caller waits for it."""
        self.outcome: ReadOutcome | None = None
        """Of a read that is done."""
        self.failure: BaseException | None = None
        """What kept the work from being tried at all."""
