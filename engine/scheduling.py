"""What the engine asks of the system's scheduler."""

from __future__ import annotations

import ctypes
import platform

from engine.ggml import libc

_SYS_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274}
_SHORTEST_SLICE_NS = 100_000


class _SchedAttr(ctypes.Structure):
    """`struct sched_attr` of linux/sched/types.h, as its first version has it."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("sched_policy", ctypes.c_uint32),
        ("sched_flags", ctypes.c_uint64),
        ("sched_nice", ctypes.c_int32),
        ("sched_priority", ctypes.c_uint32),
        ("sched_runtime", ctypes.c_uint64),
        ("sched_deadline", ctypes.c_uint64),
        ("sched_period", ctypes.c_uint64),
    ]


def ask_for_short_slices() -> bool:
    """Let this thread have the processor in short slices, and soon when it wakes.

    A thread that works for some 50 us and then waits for the disk otherwise waits first for the
    computing thread's slice to end, which takes as long as several layers. Needs no privilege.
    False where the system does not know how (Linux before 6.12, other systems).
    """
    number = _SYS_SCHED_SETATTR.get(platform.machine())
    if number is None or platform.system() != "Linux":
        return False
    attributes = _SchedAttr(size=ctypes.sizeof(_SchedAttr), sched_runtime=_SHORTEST_SLICE_NS)
    return bool(libc.syscall(number, 0, ctypes.byref(attributes), 0) == 0)
