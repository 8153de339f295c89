"""Sweeps with the real engine: every cell a process of its own, kept whatever happens."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commandline import Cli, Tiny, cli, command, own_home, program

__all__ = ["cli", "own_home"]  # fixtures

SMALL = ("--set", "force-cache=true", "--set", "ctx=512", "--set", "cache-mb=2")
SHORT = (*SMALL, "--set", "n-predict=20", "--set", "ignore-eos=true", "-p", "a b c")
DROP = ("--vary", "drop-cold-experts=0,0.75")


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without matplotlib, to save time: the plots have tests of their own."""
    monkeypatch.setattr("tuiwork.sweep.report.plots_possible", lambda: False)


def cells(folder: Path) -> dict[str, dict[str, Any]]:
    """The records of finished cells by id."""
    return {
        path.parent.name: json.loads(path.read_text())
        for path in sorted((folder / "cells").glob("[!.]*/cell.json"))
    }


def wait_for(condition: Any, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.05)


def test_a_sweep_runs_and_its_folder_has_everything(
    tiny_model: Tiny, tmp_path: Path, cli: Cli
) -> None:
    folder = tmp_path / "out"
    hopeless = ("--cool-down", "min-available-mb=99999999", "--cool-down", "give-up-after=0")
    arguments = ("sweep", tiny_model(), *DROP, *SHORT, "--rounds", "2", "--out", folder, *hopeless)
    found = cli(*arguments)
    assert found.status == 0, found.err
    records = cells(folder)
    order = sorted(records, key=lambda cell: records[cell]["started"])
    assert order == ["r1-p1-A", "r1-p1-B", "r2-p1-B", "r2-p1-A"]
    for record in records.values():
        assert set(record["entry"]) == {"available_mib", "cpu_mhz", "temperature_c", "load"}
        assert record["cool_down"]["gave_up"]
        assert record["cool_down"]["unmet"][0].startswith("available memory ")
        assert record["resolved"]["stream"]["cache-mb"] == 2
    for line in ("[1/4] r1-p1-A  drop-cold-experts=0: ", "[4/4] r2-p1-A", "left"):
        assert line in found.err
    names = {path.name for path in folder.iterdir()}
    assert {"plan.json", "profiles", "cells", "report.md", "report.html"} <= names
    assert "plots" not in names
    assert "<img" not in (folder / "report.html").read_text()
    assert "drop-cold-experts = 0.75" in (folder / "profiles" / "B.toml").read_text()
    answer = json.loads((folder / "cells" / "r1-p1-A" / "run.json").read_text())
    assert len(answer["tokens"]) == 20
    compared = cli("compare", *sorted(folder.glob("cells/*/tokens.csv")), "--json")
    assert len(json.loads(compared.out)["pairs"]) == 6

    before = {path: path.stat().st_mtime_ns for path in folder.glob("cells/*/*")}
    for again in (arguments, ("sweep", "--resume", folder)):
        found = cli(*again)
        assert found.status == 0, found.err
        assert "[1/4]" not in found.err
        assert {path: path.stat().st_mtime_ns for path in folder.glob("cells/*/*")} == before
    assert cli(*arguments, "-p", "another").status == 2
    profile = folder / "profiles" / "B.toml"
    assert cli("profiles", "check", profile).status == 0


def test_a_killed_sweep_goes_on_without_losing_or_repeating(
    tiny_model: Tiny, tmp_path: Path, cli: Cli
) -> None:
    folder = tmp_path / "out"
    arguments = ("sweep", tiny_model(), *SHORT, "--vary", "n-predict=20,150", "--rounds", "1")
    first = folder / "cells" / "r1-p1-A"
    with subprocess.Popen(
        command(*arguments, "--out", folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as sweep:
        wait_for(lambda: first.exists() or sweep.poll() is not None)
        wait_for((folder / "cells" / ".work-r1-p1-B").exists)
        sweep.kill()
    assert list(cells(folder)) == ["r1-p1-A"]
    before = (first / "tokens.csv").read_bytes(), first.stat().st_mtime_ns
    found = cli("sweep", "--resume", folder)
    assert found.status == 0, found.err
    assert list(cells(folder)) == ["r1-p1-A", "r1-p1-B"]
    assert ((first / "tokens.csv").read_bytes(), first.stat().st_mtime_ns) == before
    assert "r1-p1-A " not in found.err
    assert not list((folder / "cells").glob(".*"))


def test_ctrl_c_ends_the_cell_and_says_how_to_go_on(tiny_model: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    arguments = ("sweep", tiny_model(), *SHORT, "--vary", "n-predict=20,480", "--out", folder)
    with subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as sweep:
        wait_for(lambda: (folder / "cells" / ".work-r1-p1-B").exists())
        sweep.send_signal(signal.SIGINT)
        _, err = sweep.communicate(timeout=60)
    assert sweep.returncode == 130, err
    assert "Traceback" not in err
    assert "Stopped: 1 of 4 cells are done and kept" in err
    assert f"Go on with: tuiwork sweep --resume '{folder}'" in err
    assert [path.name for path in (folder / "cells").iterdir()] == ["r1-p1-A"]
    assert "3 cells are missing" in (folder / "report.md").read_text()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """`small_disk(kib)`: a disk of that size; skips the test where none can be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(kib: int) -> Path:
        options = ["-t", "tmpfs", "-o", f"size={kib}k", "none", str(folder)]
        done = subprocess.run(["mount", *options], capture_output=True, check=False)
        if done.returncode != 0:
            pytest.skip("a small disk can only be mounted by root")
        return folder

    yield mount
    subprocess.run(["umount", str(folder)], capture_output=True, check=False)


@pytest.mark.parametrize(
    ("kib", "words"),
    [(60, "writing the metrics failed: No space left"), (96, "disk/out: No space left")],
    ids=["for the run", "for the sweep"],
)
def test_a_full_disk_in_mid_sweep_keeps_what_is_done(
    tiny_model: Tiny, small_disk: Callable[[int], Path], kib: int, words: str
) -> None:
    folder = small_disk(kib) / "out"
    arguments = ("sweep", tiny_model(), *SHORT, "--vary", "n-predict=20,150", "--out", folder)
    found = program(*arguments, capture_output=True)
    assert found.returncode == 1
    assert "Traceback" not in found.stderr
    assert words in found.stderr
    assert "1 of 4 cells are done and kept" in found.stderr
    assert f"go on with: tuiwork sweep --resume {folder}" in found.stderr
    assert "A  n-predict=20" in found.stdout
    assert list(cells(folder)) == ["r1-p1-A"]
    assert not list((folder / "cells").glob(".*"))


def test_a_failing_cell_is_told_and_the_others_run(
    tiny_model: Tiny, tmp_path: Path, cli: Cli
) -> None:
    folder = tmp_path / "out"
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny_model().read_bytes()[:5000])
    for name, path in (("good", tiny_model()), ("bad", broken)):
        (tmp_path / f"{name}.toml").write_text(f'[model]\npath = "{path}"\n')
    profiles = (tmp_path / "bad.toml", tmp_path / "good.toml")
    found = cli("sweep", *profiles, *SHORT, "--rounds", "1", "--out", folder)
    assert found.status == 1
    assert "r1-p1-A (bad) failed: the run ended with status 2" in found.err
    assert "1 of 2 cells failed; 1 of 2 cells are done and kept" in found.err
    assert list(cells(folder)) == ["r1-p1-B"]
    reason = json.loads((folder / "failed" / "r1-p1-A.json").read_text())["reason"]
    assert "broken.gguf" in reason
    assert "r1-p1-A failed:" in (folder / "report.md").read_text()


@pytest.mark.skipif(
    importlib.util.find_spec("distributed") is None, reason="Dask's distributed is not installed"
)
def test_two_dask_workers_share_the_cells(tiny_model: Tiny, tmp_path: Path, cli: Cli) -> None:
    folder = tmp_path / "out"
    arguments = ("sweep", tiny_model(), *DROP, *SHORT, "--out", folder, "--dask", "local:2")
    found = cli(*arguments)
    assert found.status == 0, found.err
    records = cells(folder)
    assert list(records) == ["r1-p1-A", "r1-p1-B", "r2-p1-A", "r2-p1-B"]
    assert {record["at_once"] for record in records.values()} == {2}
    assert "up to 2 cells ran at once" in found.out


def test_dask_that_is_not_installed_is_named(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "distributed" else find(name)
    )
    found = cli("sweep", "-p", "x", "--dask", "local:2", "--out", tmp_path / "out")
    assert found.status == 2
    assert "--dask needs Dask's distributed, which is not installed" in found.err
