"""The addresses that llama.cpp believes are the model file, and what really lies beneath them.

llama.cpp maps a model file and points every tensor into the mapping. We keep its addresses and
replace the pages under them, so nothing in llama.cpp is rebound: an expert's bytes at file offset
`o` belong at `base + o`, and because a mapping is page-aligned, that address is congruent to the
file offset modulo the page size. That is what O_DIRECT needs to read straight into place.

Loading a model maps it with MAP_POPULATE, which reads the whole file: minutes for a 200 GB model,
and it pushes everything else out of memory. So llama.cpp is given a stand-in: a file in memory
that holds the header and is as long as the model, and is cut off behind the header before it is
mapped (its log tells when the files are open). Populating then stops at the header. Afterwards the
real file is mapped over the stand-in's addresses.

Kinds of pages after `open_mapping`:
- file pages (as llama.cpp would have them): whatever is not claimed below, read on demand;
- own pages (`claim`): anonymous memory, zero until something is read into it;
- shared scratch (`share`): several ranges on the same physical pages.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import ggml
from engine.errors import ModelError
from engine.ggml import libc, llama
from engine.model_file import ModelFile

PAGE = mmap.PAGESIZE
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MADV_RANDOM, _MADV_DONTNEED, _MADV_NOHUGEPAGE = 1, 4, 15
_HEADER_SLACK_BYTES = 1 << 20
_MAPS_LINE = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) (\d+)", re.M
)

_mmap = libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_madvise = libc.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_mremap = libc.mremap
_mremap.restype = ctypes.c_void_p
_mremap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
]
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4
_MAP_FAILED = ctypes.c_void_p(-1).value


def page_floor(value: int) -> int:
    """The start of the page that holds byte `value`."""
    return value & -PAGE


def page_ceil(value: int) -> int:
    """The first page start at or after byte `value`."""
    return -(-value // PAGE) * PAGE


@dataclass(frozen=True)
class ShardMapping:
    """One shard's place in the address space: file offset `o` is at `base + o`."""

    path: Path
    base: int
    start: int
    """First mapped file offset; llama.cpp unmaps the header."""
    end: int
    size: int
    view: memoryview
    """The whole shard as bytes; only own pages may be written."""

    @classmethod
    def at(cls, path: Path, base: int, start: int, end: int, size: int) -> ShardMapping:
        """Describe a mapping that exists at `base`."""
        window = (ctypes.c_char * end).from_address(base)
        return cls(path, base, start, end, size, memoryview(window).cast("B"))

    def claim(self, first: int, last: int) -> None:
        """Put own, empty pages under file offsets `first` to `last` (page multiples)."""
        self._map(first, last, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)

    def share(self, first: int, last: int, scratch_fd: int, scratch_offset: int) -> None:
        """Put the scratch file's pages, from `scratch_offset`, under `first` to `last`."""
        self._map(first, last, mmap.MAP_SHARED, scratch_fd, scratch_offset)

    def release(self, first: int, last: int) -> None:
        """Give the memory under own pages back; they read as zero until loaded again."""
        if _madvise(self.base + first, last - first, _MADV_DONTNEED) != 0:
            raise OSError(ctypes.get_errno(), "madvise")

    def expect_random_reads(self, first: int, last: int) -> None:
        """Let a fault in the file's pages from `first` to `last` fetch its own page alone.

        Otherwise the kernel reads around it: 8 MiB and 5.6 ms for one row of 1 152 bytes were
        measured, against 0.1 to 0.3 ms. Only advice: a refusal costs time and nothing else.
        """
        _madvise(self.base + first, last - first, _MADV_RANDOM)

    def use_small_pages(self, first: int, last: int) -> None:
        """Keep the kernel from holding own pages from `first` to `last` as large ones.

        Where transparent huge pages are always on, as in many distributions, the first byte read
        into 2 MiB takes all of them, and a cache of 2 000 MiB took 3 750. Only advice: a kernel
        without large pages refuses it.
        """
        _madvise(self.base + first, last - first, _MADV_NOHUGEPAGE)

    def fill(self, first: int, last: int, byte: int) -> None:
        """Write `byte` all over own pages (poison for tests)."""
        ctypes.memset(self.base + first, byte, last - first)

    def _map(self, first: int, last: int, flags: int, fd: int, offset: int) -> None:
        if first >= last:
            return
        place_mapping(
            self.base + first, last - first, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset
        )


def move_pages(source: int, target: int, length: int) -> bool:
    """Move the memory under own pages at `source` to own pages at `target`, contents and all.

    What was at `target` is given back; `source` reads as zero until loaded again. Some 35 us for a
    slice of 216 pages, where freeing it and faulting in as many takes 300. False where the system
    refuses (before Linux 5.7, or too many mappings): then `source` is as it was, and `target` may
    be mapped no more.
    """
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
    return bool(_mremap(source, length, length, flags, target) == target)


def pages_can_move() -> bool:
    """Whether this system moves pages as `move_pages` needs it."""
    with mmap.mmap(-1, 2 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        window = ctypes.c_char.from_buffer(memory)
        source = ctypes.addressof(window)
        del window
        memory[0] = 1
        # Our own byte at its new place, or the call did something else.
        return move_pages(source, source + PAGE, PAGE) and memory[PAGE] == 1 and memory[0] == 0


def place_mapping(
    address: int, length: int, protection: int, flags: int, fd: int, offset: int
) -> None:
    """mmap at a fixed address, or ModelError with the system's reason."""
    if _mmap(address, length, protection, flags | _MAP_FIXED, fd, offset) == _MAP_FAILED:
        code = ctypes.get_errno()
        raise ModelError(
            f"the system refused {length >> 20} MiB of address space for the model "
            f"({os.strerror(code)}); look at ulimit -v and vm.overcommit_memory"
        )


def load_model(
    file: ModelFile, params: Any, progress: Callable[[float], None] | None = None
) -> tuple[Any, list[ShardMapping]]:
    """Load `file` with llama.cpp, reading only its header; return the model and its mappings.

    `params` are llama_model_params; mapping is switched on in them. Afterwards every tensor's
    bytes are the real file's, read on demand. Raises ModelError with llama.cpp's own reason.
    """
    params.load_mode = llama.LLAMA_LOAD_MODE_MMAP
    params.use_extra_bufts = False  # repacked experts would no longer be the file's bytes
    with _stand_ins(file) as stand_ins, capture_log() as log:
        log.on_line = stand_ins.cut_when_opened
        model = _load_from_paths(stand_ins.paths, params)
        if not model:
            raise ModelError(f"{file.paths[0]}: llama.cpp cannot load it: {log.reason()}")
        mappings = [
            _find_mapping(path, size, identity)
            for path, size, identity in zip(
                file.paths, file.sizes, stand_ins.identities, strict=True
            )
        ]
    for mapping in mappings:
        _map_real_file(mapping)
    return model, mappings


class _StandIns:
    """In-memory files that look like the model until llama.cpp has opened them."""

    def __init__(self, file: ModelFile) -> None:
        self._header_bytes = list(file.data_offsets)
        self._fds = [os.memfd_create("tuiwork-model") for _ in file.paths]
        self.paths = [f"/proc/self/fd/{fd}" for fd in self._fds]
        self.identities = [_identity(fd) for fd in self._fds]
        self._cut = False
        for fd, path, size, header in zip(
            self._fds, file.paths, file.sizes, file.data_offsets, strict=True
        ):
            with path.open("rb") as source:
                os.pwrite(fd, source.read(header), 0)
            os.ftruncate(fd, size)

    def cut_when_opened(self, line: str) -> None:
        """At llama.cpp's word that all files are open: leave only the header to be populated."""
        if not self._cut and "loaded meta data with" in line:
            self._cut = True
            for fd, header in zip(self._fds, self._header_bytes, strict=True):
                os.ftruncate(fd, header)

    @property
    def populated_bytes(self) -> int:
        """What llama.cpp made of the stand-ins in memory; header-sized if the cut came in time."""
        return sum(os.fstat(fd).st_blocks * 512 for fd in self._fds)

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


@contextmanager
def _stand_ins(file: ModelFile) -> Iterator[_StandIns]:
    stand_ins = _StandIns(file)
    try:
        yield stand_ins
        headers = sum(file.data_offsets)
        if stand_ins.populated_bytes > headers + _HEADER_SLACK_BYTES * len(file.paths):
            raise ggml.AbiMismatch(
                "llama.cpp no longer says 'loaded meta data with' between opening and mapping "
                "a model, so the engine cannot keep it from reading the whole file"
            )
    finally:
        stand_ins.close()


def _identity(fd: int) -> tuple[int, int, int]:
    status = os.fstat(fd)
    return os.major(status.st_dev), os.minor(status.st_dev), status.st_ino


def _load_from_paths(paths: Sequence[str], params: Any) -> Any:
    encoded = [path.encode() for path in paths]
    if len(encoded) == 1:
        return llama.llama_model_load_from_file(encoded[0], params)
    array = (ctypes.c_char_p * len(encoded))(*encoded)
    return llama.llama_model_load_from_splits(array, len(encoded), params)


def _find_mapping(path: Path, size: int, identity: tuple[int, int, int]) -> ShardMapping:
    """Where this process has the file with `identity` mapped, from /proc/self/maps."""
    pieces = []
    for match in _MAPS_LINE.finditer(Path("/proc/self/maps").read_text()):
        first, last, offset, major, minor = (int(match[group], 16) for group in range(1, 6))
        if (major, minor, int(match[6])) == identity:
            pieces.append((first - offset, offset, offset + last - first))
    if not pieces or len({base for base, _, _ in pieces}) != 1:
        raise ggml.AbiMismatch(f"llama.cpp did not map {path.name} in one piece")
    return ShardMapping.at(
        path, pieces[0][0], min(p[1] for p in pieces), max(p[2] for p in pieces), size
    )


def _map_real_file(mapping: ShardMapping) -> None:
    fd = os.open(mapping.path, os.O_RDONLY)
    try:
        if os.fstat(fd).st_size != mapping.size:
            raise ModelError(
                f"{mapping.path}: the file was replaced or changed while it was opened"
            )
        place_mapping(
            mapping.base + mapping.start,
            mapping.end - mapping.start,
            mmap.PROT_READ,
            mmap.MAP_PRIVATE,
            fd,
            mapping.start,
        )
    finally:
        os.close(fd)


_STATE_SIZE = re.compile(r" (?:KV|RS) buffer size = +([0-9.]+) MiB")


class LogCapture:
    """llama.cpp's log while it loads: kept for its error lines, silent otherwise."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.on_line: Callable[[str], None] | None = None

    def take(self, _level: int, text: bytes | None, _data: Any) -> None:
        line = (text or b"").decode(errors="replace").rstrip()
        self.lines.append(line)
        if self.on_line is not None:
            self.on_line(line)

    def state_bytes(self) -> int | None:
        """The memory that a new context said it took for keys, values and recurrent states."""
        sizes = [match[1] for line in self.lines if (match := _STATE_SIZE.search(line))]
        return round(sum(map(float, sizes)) * 2**20) if sizes else None

    def reason(self) -> str:
        """The last thing that llama.cpp called an error, in its words."""
        for line in reversed(self.lines):
            _, found, reason = line.partition("error loading model")
            if found:
                return reason.lstrip(": ").removeprefix("hyperparameters: ") or line
        return self.lines[-1] if self.lines else "no reason given"


@contextmanager
def capture_log() -> Iterator[LogCapture]:
    """Take llama.cpp's log instead of letting it reach the terminal."""
    capture = LogCapture()
    function = llama.llama_log_callback(capture.take)
    llama.llama_log_set(function, None)
    try:
        yield capture
    finally:
        llama.llama_log_set(ggml.SILENT_LOG, None)
