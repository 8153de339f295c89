"""What this machine has and allows: cores, memory, limits of a container, kernel features.

Everything is asked afresh at each call and read from where the kernel tells it; nothing is
changed. Unknown is None, never zero.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_DEFAULT_MAX_MAPPINGS = 65530
_UNLIMITED_BYTES = 2**60
"""cgroup v1 says "no limit" as a number near 2^63."""

_SYS_USERFAULTFD = {"x86_64": 323, "aarch64": 282}
_UFFD_USER_MODE_ONLY = 1


@dataclass(frozen=True)
class CgroupMemory:
    """The tightest memory limit that a control group sets on this process."""

    path: Path
    limit_bytes: int
    used_bytes: int
    """Memory that cannot be reclaimed: page cache of files is not counted."""

    @property
    def available_bytes(self) -> int:
        """What may still be allocated under the limit."""
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True)
class Memory:
    """Memory as a new allocation finds it."""

    total_bytes: int
    available_bytes: int
    """The smaller of what the machine and what the control group has left."""
    cgroup: CgroupMemory | None


def physical_cores() -> int:
    """Cores that this process may run on, hyper-threads counted once where that is known."""
    usable = usable_cpus()
    physical = psutil.cpu_count(logical=False) or usable
    return max(1, min(physical, usable))


def usable_cpus() -> int:
    """Logical processors that this process may run on."""
    try:
        return max(1, len(os.sched_getaffinity(0)))
    except (AttributeError, OSError):
        return os.cpu_count() or 1


def cpu_quota() -> float | None:
    """Processors' worth of time that a control group allows, or None without a limit."""
    for folder in _cgroup_folders("cpu"):
        text = _read(folder / "cpu.max")
        if text is not None:
            quota, _, period = text.partition(" ")
            if quota != "max" and period:
                return int(quota) / int(period)
        v1_quota = _read_number(folder / "cpu.cfs_quota_us")
        v1_period = _read_number(folder / "cpu.cfs_period_us")
        if v1_quota and v1_period and v1_quota > 0:
            return v1_quota / v1_period
    return None


def memory() -> Memory:
    """Memory now, as limited by the machine and by the control group."""
    machine = psutil.virtual_memory()
    group = cgroup_memory()
    total, available = int(machine.total), int(machine.available)
    if group is not None:
        total = min(total, group.limit_bytes)
        available = min(available, group.available_bytes)
    return Memory(total, available, group)


def cgroup_memory() -> CgroupMemory | None:
    """The limit that leaves the least, over this process's group and all above it."""
    groups = [
        group for folder in _cgroup_folders("memory") if (group := _group_at(folder)) is not None
    ]
    return min(groups, key=lambda group: group.available_bytes, default=None)


def userfaultfd_refusal() -> str | None:
    """Why userfaultfd cannot be used here, or None if it can."""
    number = _SYS_USERFAULTFD.get(os.uname().machine) if sys.platform == "linux" else None
    if number is None:
        return "this system has none"
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK | _UFFD_USER_MODE_ONLY)
    if fd >= 0:
        os.close(fd)
        return None
    code = ctypes.get_errno()
    reasons = {
        errno.EPERM: "not permitted (a container's rules, or vm.unprivileged_userfaultfd)",
        errno.ENOSYS: "the kernel is built without it",
        errno.EINVAL: "the kernel is older than 5.11",
    }
    return reasons.get(code, os.strerror(code))


def max_mappings() -> int:
    """How many memory mappings the system allows a process."""
    return _read_number(Path("/proc/sys/vm/max_map_count")) or _DEFAULT_MAX_MAPPINGS


def cpu_name() -> str:
    """The processor's name as the kernel tells it, or its kind."""
    for line in (_read(Path("/proc/cpuinfo")) or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return os.uname().machine


def filesystem_of(path: Path) -> str:
    """The type of the filesystem that holds `path` (`ext4`), or `unknown`."""
    real = path.resolve()
    mounts = [
        (mount.mountpoint, mount.fstype)
        for mount in psutil.disk_partitions(all=True)
        if real.is_relative_to(mount.mountpoint)
    ]
    # The deepest mount holds the file; of several at one place, the last one covers the others.
    deepest = max((len(point) for point, _ in mounts), default=0)
    return next((kind for point, kind in reversed(mounts) if len(point) == deepest), "unknown")


def _cgroup_folders(controller: str) -> Iterator[Path]:
    """This process's control group and all above it, for v2 and for v1's `controller`."""
    for line in (_read(Path("/proc/self/cgroup")) or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            root = _CGROUP_ROOT
        elif controller in controllers.split(","):
            # v1's cpu controller is often mounted together with cpuacct.
            roots = (_CGROUP_ROOT / controllers, _CGROUP_ROOT / controller)
            root = next((folder for folder in roots if folder.is_dir()), roots[-1])
        else:
            continue
        # Inside a container the path may be the host's: then only the root exists here.
        folder = root / path.lstrip("/")
        while folder.is_relative_to(root):
            if folder.is_dir():
                yield folder
            folder = folder.parent


def _group_at(folder: Path) -> CgroupMemory | None:
    limit = _read_number(folder / "memory.max")
    used = _read_number(folder / "memory.current")
    reclaimable = ("inactive_file", "active_file")
    if limit is None:
        limit = _read_number(folder / "memory.limit_in_bytes")
        used = _read_number(folder / "memory.usage_in_bytes")
        reclaimable = ("total_inactive_file", "total_active_file")
    if limit is None or limit >= _UNLIMITED_BYTES:
        return None
    stat = dict(line.split(" ", 1) for line in (_read(folder / "memory.stat") or "").splitlines())
    cached = sum(int(stat.get(name, 0)) for name in reclaimable)
    return CgroupMemory(folder, limit, max(0, (used or 0) - cached))


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _read_number(path: Path) -> int | None:
    try:
        return int(_read(path) or "")
    except ValueError:
        return None
