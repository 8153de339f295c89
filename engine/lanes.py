"""The I/O lanes: N parallel readers that move bytes from shards straight to their addresses.

Lanes only move bytes; what to read and where is decided by the callback's thread. It submits jobs,
and where it must wait for one it is lane 0 itself. Each lane has its own descriptors.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter_ns

from engine.background import Background
from engine.counters import LATENCY_BUCKETS, MAX_LANES, LaneCounters
from engine.errors import InputError, ReadError
from engine.lane_jobs import Job, Move, Read, ReadOutcome, Release
from engine.mapping import ShardMapping, move_pages
from engine.positioned import O_DIRECT, direct_reads_work, read_range
from engine.scheduling import ask_for_short_slices


class Lanes:
    """Parallel readers over the shards of one model."""

    def __init__(
        self,
        mappings: Sequence[ShardMapping],
        count: int,
        *,
        o_direct: bool = True,
        counters: LaneCounters | None = None,
    ) -> None:
        self._mappings = list(mappings)
        self.counters = counters or LaneCounters()
        self.o_direct = o_direct and all(direct_reads_work(m.path) for m in self._mappings)
        # Written for speed: a deque's ends and a SimpleQueue are safe between threads and in C. A
        # lane that finds no job sleeps until it is woken; the jobs are there before the waking is.
        self._urgent: deque[Job] = deque()
        self._spare: deque[Job] = deque()
        self._background: Background[Job] = Background(MAX_LANES)
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._finished: SimpleQueue[None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._own_fds: list[int] = []
        self._own_fds = self._open_all()
        try:
            self.set_count(count)
        except BaseException:
            self.close()
            raise

    @property
    def count(self) -> int:
        """Lanes that work now, the caller's thread included."""
        return len(self._threads) + 1

    @property
    def own_fds(self) -> list[int]:
        """The descriptors of the caller's thread, by shard; they stay ours."""
        return self._own_fds

    def set_count(self, count: int) -> None:
        """Change the number of lanes; call it while no urgent job is under way.

        Raises InputError where the system refuses so many; then there are no more than before.
        """
        before = self.count
        if count < before:
            # Any lane may take the end mark, so all are stopped and the wanted number restarted.
            self._stop_threads()
        while self.count < count:
            try:
                self._start_lane()
            except (OSError, RuntimeError) as error:
                most = self.count
                self.set_count(min(before, most))
                reason = error.strerror if isinstance(error, OSError) else error
                raise InputError(
                    f"stream.io-threads = {count}: the system lets no more than {most} work now "
                    f"({reason}). Each takes a thread and {len(self._own_fds)} open files: ask for "
                    "fewer, or raise the limits (ulimit -u, ulimit -n)"
                ) from error

    def read_all(
        self, reads: Sequence[Read], releases: Sequence[Release] = ()
    ) -> list[ReadOutcome]:
        """Read everything and return when it is in place; give `releases` back meanwhile.

        Raises ReadError if any read failed; all others are done by then.
        """
        return self.finish(self.submit(reads, releases))

    def submit(
        self, reads: Sequence[Read], releases: Sequence[Release] = (), *, spare: bool = False
    ) -> list[Job]:
        """Let the other lanes begin; return a job for each, in the same order.

        `spare` jobs are taken only while no other waits, and in the order of submission.
        """
        # Behind the reads: giving pages back is processor work that the waiting for reads hides.
        jobs = [Job(read) for read in reads] + [Job(release) for release in releases]
        (self._spare if spare else self._urgent).extend(jobs)
        for _ in range(min(len(jobs), len(self._threads))):
            self._wake.put(True)
        return jobs

    def submit_background(self, reads: Sequence[Read], report: deque[Job]) -> list[Job]:
        """Read these whenever a lane has nothing else to do and nothing is waited for.

        Each job puts itself into `report`, before it is done for those who wait. With no lane
        beside the caller's thread they are done only if they are waited for.
        """
        jobs = [Job(read, report) for read in reads]
        self._background.add(jobs)
        self._wake_for_background()
        return jobs

    def withdraw(self, job: Job) -> bool:
        """Have a background job never done; False if it has been begun."""
        return self._background.take_back(job)

    def hurry(self, job: Job) -> None:
        """Let a background job that has not been begun be a spare one."""
        if self._background.take_back(job):
            self._spare.append(job)
            self._wake.put(True)

    def pause_background(self) -> None:
        """Return when no background job is being done, and none will be begun."""
        self._background.pause()

    def resume_background(self) -> None:
        """Let background jobs be begun again."""
        self._background.resume()
        self._wake_for_background()

    def _wake_for_background(self) -> None:
        # One lane is enough: each that finds a job wakes another.
        if self._background and self._threads and self._wake.empty():
            self._wake.put(True)

    def run(self, task: Callable[[], None]) -> Job:
        """Let a lane call `task`, before any reads that were submitted."""
        job = Job(task)
        self._urgent.appendleft(job)
        self._wake.put(True)
        return job

    def cancel(self, job: Job) -> None:
        """Return when the job is done, or will never be begun."""
        try:
            self._urgent.remove(job)
        except ValueError:
            self.wait([job])
        else:
            job.done = True

    def finish(self, jobs: Sequence[Job]) -> list[ReadOutcome]:
        """Wait until `jobs` are done, working on them as lane 0; return how their reads went.

        Raises ReadError if any read failed; all others are done by then.
        """
        self.wait(jobs)
        outcomes = []
        for job in jobs:
            if job.failure is not None:
                raise job.failure
            if job.outcome is not None:
                outcomes.append(job.outcome)
        for outcome in outcomes:
            if outcome.error is not None:
                raise ReadError(self._explain(outcome)) from outcome.error
        return outcomes

    def wait(self, jobs: Sequence[Job]) -> None:
        """Wait until `jobs` are done, well or not, working on them as lane 0."""
        for job in jobs:
            job.wanted = True
        background = self._background
        if self._spare or background:
            self._promote(jobs)
        background.yields = True
        try:
            for job in jobs:
                while not job.done:
                    if not self._help():
                        self._finished.get()
            while not self._finished.empty():  # words of jobs that were done before we looked
                self._finished.get()
        finally:
            background.yields = False
            if background:
                self._wake_for_background()

    def _promote(self, jobs: Sequence[Job]) -> None:
        """What is waited for now is no longer spare."""
        for job in jobs:
            if not job.done and self._take_back(job):
                self._urgent.append(job)

    def _take_back(self, job: Job) -> bool:
        if self._background.take_back(job):
            return True
        try:
            self._spare.remove(job)
        except ValueError:
            return False
        return True

    def _help(self) -> bool:
        """Do the next job here, if it is one that is waited for or nobody else would."""
        try:
            if self._threads and not self._urgent[0].wanted:
                return False
        except IndexError:
            return False
        job = self._next_job()
        if job is not None:
            self._do(job, 0, self._own_fds)
        return job is not None

    def _next_job(self) -> Job | None:
        for queue in (self._urgent, self._spare):
            try:
                return queue.popleft()
            except IndexError:
                continue
        return None

    def close(self) -> None:
        """Stop the lanes and close their descriptors; spare jobs that wait are not done."""
        self._spare.clear()
        self._background.clear()
        self._stop_threads()
        _close_all(self._own_fds)

    def _start_lane(self) -> None:
        # Its files are opened here, where a refusal can be told.
        lane, fds = self.count, self._open_all()
        thread = threading.Thread(
            target=self._run_lane, args=(lane, fds), name=f"tuiwork-lane-{lane}", daemon=True
        )
        try:
            thread.start()
        except BaseException:
            _close_all(fds)
            raise
        self._threads.append(thread)

    def _run_lane(self, lane: int, fds: list[int]) -> None:
        ask_for_short_slices()
        try:
            while self._wake.get():
                while (job := self._next_job()) is not None or self._do_background(lane, fds):
                    if job is not None:
                        self._do(job, lane, fds)
        finally:
            _close_all(fds)

    def _do_background(self, lane: int, fds: list[int]) -> bool:
        """Do one background job, if there is one and its time is now."""
        background = self._background
        job = background.next(lane) if background else None
        if job is None:
            return False
        self._wake_for_background()
        try:
            self._do(job, lane, fds)
        finally:
            background.done(lane)
        return True

    def _stop_threads(self) -> None:
        for _ in self._threads:
            self._wake.put(False)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _open_all(self) -> list[int]:
        flags = os.O_RDONLY | os.O_CLOEXEC | (O_DIRECT if self.o_direct else 0)
        # Later lanes open what the first has open: by now the path may name another file.
        paths: Sequence[Path | str] = [f"/proc/self/fd/{fd}" for fd in self._own_fds] or [
            mapping.path for mapping in self._mappings
        ]
        fds: list[int] = []
        try:
            for path in paths:
                fds.append(os.open(path, flags))
        except BaseException:
            _close_all(fds)
            raise
        return fds

    def _do(self, job: Job, lane: int, fds: list[int]) -> None:
        work = job.work
        try:
            if isinstance(work, Read):
                job.outcome = self._read(work, self._mappings[work.shard], lane, fds)
            elif isinstance(work, Release):
                self._mappings[work.shard].release(work.first, work.last)
            else:
                work()
        except BaseException as failure:  # must reach the caller, who would wait for ever
            job.failure = failure
        # Before `done`: whoever waited for the job finds it reported.
        if job.report is not None:
            job.report.append(job)
        job.done = True
        # Looked at after `done` is set, and set before `done` is looked at: no word is lost.
        if job.wanted:
            self._finished.put(None)

    def _read(self, read: Read, mapping: ShardMapping, lane: int, fds: list[int]) -> ReadOutcome:
        started = perf_counter_ns()
        if read.move is not None:
            self._move(read.move, mapping)
        done, error = 0, None
        try:
            done = read_range(fds[read.shard], mapping.view, read.first, read.last, mapping.size)
        except OSError as failure:
            error = failure
        took = perf_counter_ns() - started
        counters = self.counters
        counters.bytes[lane] += done
        counters.reads[lane] += 1
        counters.busy_ns[lane] += took
        counters.latency_counts[lane, min((took // 1000).bit_length(), LATENCY_BUCKETS - 1)] += 1
        return ReadOutcome(read, lane, done, took, error)

    def _move(self, move: Move, target: ShardMapping) -> None:
        release = move.release
        source, length = self._mappings[release.shard], release.core_bytes
        end = release.core_first + length
        if not move_pages(source.base + release.core_first, target.base + move.target, length):
            source.release(release.core_first, end)
            # A refusal may come after the target was unmapped.
            target.claim(move.target, move.target + length)
        if release.first < release.core_first:
            source.release(release.first, release.core_first)
        if end < release.last:
            source.release(end, release.last)

    def _explain(self, outcome: ReadOutcome) -> str:
        read, error = outcome.read, outcome.error
        assert error is not None
        what = "dense weights" if read.tag is None else str(read.tag)
        return read_failure(self._mappings[read.shard].path, what, read.first, read.last, error)


def read_failure(path: Path, what: str, first: int, last: int, error: OSError) -> str:
    """In words: bytes `first` to `last` of the file could not be read."""
    code = errno.errorcode.get(error.errno or 0, "?")
    return (
        f"{path}: reading {what} failed at offset {first} ({last - first} bytes): "
        f"{error.strerror or error} [{code}]"
    )


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
