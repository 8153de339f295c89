"""Positioned reads straight into place, past the page cache where the filesystem allows it."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

from engine.mapping import PAGE, page_floor

O_DIRECT = getattr(os, "O_DIRECT", 0)


def read_range(fd: int, view: memoryview, first: int, last: int, size: int) -> int:
    """Read file bytes `first` to `last` to the same offsets of `view`; return the bytes read.

    The end of the file may come inside the last page. Short reads go on where they stopped, from
    a page boundary, because O_DIRECT takes no other. Raises OSError.
    """
    wanted = min(last, size)
    position = first
    while position < wanted:
        got = os.preadv(fd, (view[position:last],), position)
        if position + got >= wanted:
            break
        resume = page_floor(position + got)
        if got == 0 or (resume == position and os.fstat(fd).st_size <= position + got):
            missing = wanted - position - got
            raise OSError(errno.ENODATA, f"the file ended {missing} bytes before the range did")
        if resume == position:
            raise OSError(errno.EIO, f"the device gave {got} bytes and no more")
        position = resume
    return wanted - first


def direct_reads_work(path: Path) -> bool:
    """Whether O_DIRECT reads at page alignment succeed on this file's filesystem."""
    if not O_DIRECT:
        return False
    try:
        fd = os.open(path, os.O_RDONLY | O_DIRECT)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, PAGE) as page:
            return os.preadv(fd, (page,), 0) > 0
    except OSError:
        return False
    finally:
        os.close(fd)
