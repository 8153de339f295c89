"""What is known of the machine: limits of control groups of both versions, and honest unknowns."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import bandwidth, machine
from engine.errors import ReadError

MIB = 2**20


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty tree of control groups that stands for this machine's."""
    root = tmp_path / "cgroup"
    root.mkdir()
    monkeypatch.setattr(machine, "_CGROUP_ROOT", root)
    return root


def member_of(monkeypatch: pytest.MonkeyPatch, lines: str) -> None:
    """Pretend that /proc/self/cgroup says `lines`."""
    real = machine._read

    def read(path: Path) -> str | None:
        return lines if path == Path("/proc/self/cgroup") else real(path)

    monkeypatch.setattr(machine, "_read", read)


def fill(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_mappings_of_the_system() -> None:
    assert machine.max_mappings() == int(Path("/proc/sys/vm/max_map_count").read_text())


def test_here() -> None:
    assert 1 <= machine.physical_cores() <= machine.usable_cpus()
    memory = machine.memory()
    assert 0 < memory.available_bytes <= memory.total_bytes
    assert machine.cpu_name()
    refusal = machine.userfaultfd_refusal()
    assert refusal is None or refusal


def test_the_tightest_v2_limit_counts(cgroups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    member_of(monkeypatch, "0::/outer/inner")
    fill(cgroups / "outer", memory__max=f"{1000 * MIB}", memory__current=f"{900 * MIB}")
    fill(
        cgroups / "outer" / "inner",
        memory__max=f"{800 * MIB}",
        memory__current=f"{500 * MIB}",
        memory__stat=f"anon 1\ninactive_file {200 * MIB}\nactive_file {50 * MIB}",
    )
    group = machine.cgroup_memory()
    assert group is not None
    assert group.path == cgroups / "outer"
    assert group.available_bytes == 100 * MIB
    assert machine.memory().available_bytes <= 100 * MIB
    assert machine.memory().total_bytes <= 1000 * MIB


def test_page_cache_is_no_use_of_a_limit(cgroups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    member_of(monkeypatch, "0::/")
    fill(
        cgroups,
        memory__max=f"{800 * MIB}",
        memory__current=f"{790 * MIB}",
        memory__stat=f"inactive_file {300 * MIB}\nactive_file {90 * MIB}",
    )
    group = machine.cgroup_memory()
    assert group is not None
    assert group.available_bytes == 400 * MIB


def test_a_v1_limit(cgroups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    member_of(monkeypatch, "4:memory:/host/path\n2:cpu,cpuacct:/\n0::/")
    # In a container the path is the host's, and only the root is there.
    fill(
        cgroups / "memory",
        memory__limit_in_bytes=f"{600 * MIB}",
        memory__usage_in_bytes=f"{500 * MIB}",
        memory__stat=f"cache 1\ntotal_inactive_file {100 * MIB}\ntotal_active_file 0",
    )
    fill(cgroups / "cpu,cpuacct", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    group = machine.cgroup_memory()
    assert group is not None
    assert (group.limit_bytes, group.available_bytes) == (600 * MIB, 200 * MIB)
    assert machine.cpu_quota() == 1.5


def test_no_limit_is_none(cgroups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    member_of(monkeypatch, "4:memory:/\n2:cpu:/\n0::/")
    fill(cgroups, memory__max="max", memory__current="5", cpu__max="max 100000")
    fill(cgroups / "memory", memory__limit_in_bytes="9223372036854771712")
    fill(cgroups / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert machine.cgroup_memory() is None
    assert machine.cpu_quota() is None


def test_a_v2_quota(cgroups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    member_of(monkeypatch, "0::/a")
    fill(cgroups / "a", cpu__max="200000 100000")
    assert machine.cpu_quota() == 2


def test_the_filesystem_is_told(tmp_path: Path) -> None:
    assert machine.filesystem_of(tmp_path / "not" / "there")


def test_lanes_are_measured_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "MOST_BYTES", 4 * MIB)
    path = tmp_path / "file"
    path.write_bytes(bytes(2 * MIB))
    rates = bandwidth.measure(path, 100_000, o_direct=False, lane_counts=(1, 3))
    assert [rate.lanes for rate in rates] == [1, 3]
    for rate in rates:
        assert 0 < rate.bytes_read <= 4 * MIB
        assert rate.bytes_per_s > 0
    assert bandwidth.fewest_good_lanes(rates) in (1, 3)


def test_the_fewest_lanes_that_are_good_win() -> None:
    rates = [bandwidth.LaneRate(n, size, 1.0) for n, size in ((1, 50), (2, 97), (4, 100), (8, 99))]
    assert bandwidth.fewest_good_lanes(rates) == 2


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ReadError, match="gone: cannot be read"):
        bandwidth.measure(tmp_path / "gone", 4096, o_direct=False)
