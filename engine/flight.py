"""The reads of one layer while they are under way, bank by bank.

A layer computes one projection of all its experts, then the next. So all of its reads are submitted
at once, in the order of the projections, and each is waited for only before it is computed: the
disk reads the second while the first is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.lane_jobs import Job, Read, ReadOutcome
from engine.lanes import Lanes


class Flight:
    """What one layer still waits for. Lives on the callback's thread."""

    def __init__(self, index: int, lanes: Lanes, banks: Sequence[str], jobs: Sequence[Job]) -> None:
        """`jobs` of one routing, already submitted; `banks` in order of use: with one, all at once.

        What jobs give back may be read into again by the next layer: it is part of the last bank.
        """
        self.index = index
        self.n_banks = len(banks)
        self.arrived = 0
        """How many banks have been waited for."""
        self._lanes = lanes
        self._groups: list[list[Job]] = [[] for _ in banks]
        place = {name: position for position, name in enumerate(banks)}
        for job in jobs:
            self._groups[place.get(bank_of(job.work), -1)].append(job)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to wait for."""
        return all(job.done for group in self._groups[self.arrived :] for job in group)

    @property
    def reads(self) -> list[Read]:
        """All reads of the routing."""
        return [job.work for group in self._groups for job in group if isinstance(job.work, Read)]

    def wait(self, bank: int) -> list[ReadOutcome]:
        """Wait for the next bank's reads. Raises ReadError."""
        self.arrived = bank + 1
        return self._lanes.finish(self._groups[bank])

    def abandon(self) -> set[int]:
        """Wait for all that is under way, failed or not; return the experts that were read."""
        for group in self._groups:
            self._lanes.wait(group)
        return {expert_of(read) for read in self.reads}


def by_bank(reads: Sequence[Read], banks: Sequence[str]) -> list[Read]:
    """Reads in the order in which their banks are used."""
    place = {name: position for position, name in enumerate(banks)}
    return sorted(reads, key=lambda read: place.get(bank_of(read), -1))


def bank_of(read: object) -> str:
    """The bank that a read of an expert is for; no name for anything else."""
    return str(getattr(getattr(read, "tag", None), "projection", ""))


def expert_of(read: Read) -> int:
    """The expert that a read is for."""
    return int(getattr(read.tag, "expert", -1))
