"""I/O lanes: bytes arrive in place, and every way a disk can fail is told, with file and offset."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import lanes as lanes_module
from engine.errors import InputError, ReadError
from engine.ggml import libc
from engine.lane_jobs import Move, Read, Release
from engine.lanes import Lanes
from engine.mapping import PAGE, ShardMapping, page_ceil
from engine.positioned import direct_reads_work, read_range

SIZE = 40 * PAGE + 123
"""Ends inside a page, as model files do."""


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[ShardMapping]:
    path = tmp_path / "shard.bin"
    path.write_bytes(np.random.default_rng(7).bytes(SIZE))
    memory = mmap.mmap(-1, page_ceil(SIZE), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    yield ShardMapping.at(path, address, 0, page_ceil(SIZE), SIZE)


@contextmanager
def lanes_on(shard: ShardMapping, count: int = 4, o_direct: bool = True) -> Iterator[Lanes]:
    lanes = Lanes([shard], count, o_direct=o_direct)
    try:
        yield lanes
    finally:
        lanes.close()


@pytest.mark.parametrize("o_direct", [True, False])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_everything_arrives_in_place(shard: ShardMapping, count: int, o_direct: bool) -> None:
    reads = [Read(0, n * PAGE, min(n + 3, 41) * PAGE, n) for n in range(0, 41, 3)]
    with lanes_on(shard, count, o_direct) as lanes:
        outcomes = lanes.read_all(reads)
    assert bytes(shard.view[:SIZE]) == shard.path.read_bytes()
    assert sorted(outcome.read.first for outcome in outcomes) == [read.first for read in reads]
    assert sum(outcome.nbytes for outcome in outcomes) == SIZE
    assert lanes.counters.bytes.sum() == SIZE
    assert lanes.counters.reads.sum() == lanes.counters.latency_counts.sum() == len(reads)
    assert (lanes.counters.reads[count:] == 0).all()


def test_the_count_changes_live(shard: ShardMapping) -> None:
    with lanes_on(shard, 2) as lanes:
        for count in (6, 1, 3):
            lanes.set_count(count)
            assert lanes.count == count
            lanes.read_all([Read(0, 0, PAGE, None)] * 5)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("refused", ["files", "threads"])
def test_lanes_that_the_system_refuses_are_told(
    shard: ShardMapping, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, open_file = threading.Thread.start, os.open

    def no_fifth(thread: threading.Thread) -> None:
        if thread.name == "tuiwork-lane-5":
            raise RuntimeError("can't start new thread")
        start(thread)

    def no_more(path: str, flags: int) -> int:
        if open_files() >= limit:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return open_file(path, flags)

    with lanes_on(shard, 3) as lanes:
        limit = open_files() + 2
        with monkeypatch.context() as patch:
            if refused == "threads":
                patch.setattr(threading.Thread, "start", no_fifth)
            else:
                patch.setattr(os, "open", no_more)
            with pytest.raises(InputError, match=r"io-threads = 64.* no more than 5 .*ulimit"):
                lanes.set_count(64)
        assert lanes.count == 3
        assert len(lanes.read_all([Read(0, 0, PAGE, None)] * 9)) == 9
        assert all(thread.is_alive() for thread in lanes._threads)
        assert open_files() == limit - 2


def test_a_failed_read_names_file_offset_what_and_errno(shard: ShardMapping) -> None:
    os.truncate(shard.path, 10 * PAGE)
    good, bad = Read(0, 0, PAGE, "good"), Read(0, 9 * PAGE, 12 * PAGE, "layer 3, expert 5, up")
    with lanes_on(shard) as lanes:
        with pytest.raises(ReadError) as failure:
            lanes.read_all([good, bad, good])
        message = str(failure.value)
        assert str(shard.path) in message
        assert "layer 3, expert 5, up" in message
        assert f"offset {9 * PAGE}" in message
        assert "ENODATA" in message
        # The lanes go on working.
        assert len(lanes.read_all([good] * 9)) == 9


@pytest.mark.parametrize("code", [errno.EIO, errno.ENXIO])
def test_errors_of_the_device(
    shard: ShardMapping, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with lanes_on(shard) as lanes:
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(ReadError, match=errno.errorcode[code]):
            lanes.read_all([Read(0, 0, PAGE, None)])


def test_release_gives_pages_back_beside_reads(shard: ShardMapping) -> None:
    with lanes_on(shard) as lanes:
        lanes.read_all([Read(0, 0, 4 * PAGE, None)])
        assert len(lanes.read_all([Read(0, 8 * PAGE, 9 * PAGE, None)], [Release(0, 0, PAGE)])) == 1
    assert bytes(shard.view[:PAGE]) == bytes(PAGE)
    assert bytes(shard.view[PAGE : 2 * PAGE]) == shard.path.read_bytes()[PAGE : 2 * PAGE]


@pytest.mark.parametrize("allowed", [True, False])
def test_a_read_takes_over_memory(
    shard: ShardMapping, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the system moves pages or not: what was read is there, what was given up is gone."""

    def refused(_source: int, target: int, length: int) -> bool:
        """As Linux may do it: the target is unmapped, then the move turns out not to go."""
        assert libc.munmap(ctypes.c_void_p(target), ctypes.c_size_t(length)) == 0
        return False

    if not allowed:
        monkeypatch.setattr(lanes_module, "move_pages", refused)
    content = shard.path.read_bytes()
    with lanes_on(shard) as lanes:
        lanes.read_all([Read(0, 0, 8 * PAGE, None)])
        release = Release(0, PAGE, 6 * PAGE, 2 * PAGE, 3 * PAGE)
        lanes.read_all([Read(0, 20 * PAGE, 25 * PAGE, None, Move(release, 21 * PAGE))])
    view = bytes(shard.view)
    assert view[20 * PAGE : 25 * PAGE] == content[20 * PAGE : 25 * PAGE]
    assert view[PAGE : 6 * PAGE] == bytes(5 * PAGE)
    assert view[:PAGE] == content[:PAGE]
    assert view[6 * PAGE : 8 * PAGE] == content[6 * PAGE : 8 * PAGE]


def test_a_lane_that_cannot_work_at_all_does_not_leave_the_caller_waiting(
    shard: ShardMapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> bool:
        raise RuntimeError("out of everything")

    monkeypatch.setattr(lanes_module, "move_pages", broken)
    release = Release(0, PAGE, 6 * PAGE, 2 * PAGE, 3 * PAGE)
    with lanes_on(shard) as lanes:
        with pytest.raises(RuntimeError, match="out of everything"):
            lanes.read_all([Read(0, 20 * PAGE, 25 * PAGE, None, Move(release, 21 * PAGE))] * 6)
        assert len(lanes.read_all([Read(0, 0, PAGE, None)] * 9)) == 9


@given(cuts=st.lists(st.integers(1, 3 * PAGE), min_size=1, max_size=40), first=st.integers(0, 20))
def test_short_reads_go_on_where_they_stopped(cuts: list[int], first: int) -> None:
    content = np.random.default_rng(3).bytes(SIZE)
    target = bytearray(page_ceil(SIZE))
    asked: list[int] = []

    def short(_fd: int, buffers: tuple[memoryview], offset: int) -> int:
        asked.append(offset)
        # A device may stop anywhere, but does not stop before its first page for ever.
        most = max(cuts[len(asked) % len(cuts)], PAGE)
        chunk = content[offset : offset + min(most, len(buffers[0]))]
        buffers[0][: len(chunk)] = chunk
        return len(chunk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", short)
        done = read_range(0, memoryview(target), first * PAGE, page_ceil(SIZE), SIZE)
    assert done == SIZE - first * PAGE
    assert target[first * PAGE : SIZE] == content[first * PAGE :]
    assert all(offset % PAGE == 0 for offset in asked)


def test_a_device_that_gives_no_progress_is_an_error(
    shard: ShardMapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", lambda *_: 100)
    with (
        shard.path.open("rb") as file,
        pytest.raises(OSError, match="gave 100 bytes and no more"),
    ):
        read_range(file.fileno(), memoryview(bytearray(4 * PAGE)), 0, 4 * PAGE, SIZE)


def test_a_file_that_ends_inside_a_page_is_told_as_that(shard: ShardMapping) -> None:
    os.truncate(shard.path, 100)
    with (
        shard.path.open("rb") as file,
        pytest.raises(OSError, match="the file ended 3996 bytes before"),
    ):
        read_range(file.fileno(), memoryview(bytearray(PAGE)), 0, PAGE, SIZE)


def test_o_direct_is_tried_not_guessed(tmp_path: Path) -> None:
    assert not direct_reads_work(tmp_path / "absent")
    on_tmpfs = Path("/proc/self/status")
    assert not direct_reads_work(on_tmpfs)
