"""What `tuiwork compare` shows: the table, the document, the plot, its mistakes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.commandline import SMALL, Cli, Tiny, cli, own_home
from tests.metrics_samples import OWN, PUBLISHED, metrics_text, shared_runs

__all__ = ["cli", "own_home"]  # fixtures

STEADY = [100.0, 110.0] * 40


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    """Two runs, the second twice as fast, of files with hostile names."""
    paths = [tmp_path / "a\x1b[2J.csv", tmp_path / "b.csv"]
    paths[0].write_text(metrics_text(STEADY, preamble=OWN | {"note": "\x9b31m"}), encoding="utf-8")
    paths[1].write_text(metrics_text([value / 2 for value in STEADY]))
    return paths


def test_the_document_of_the_shared_runs(cli: Cli) -> None:
    paths = shared_runs()
    found = json.loads(cli("compare", *paths, "--json").out)
    assert [run["file"] for run in found["runs"]] == [str(path) for path in paths]
    assert [round(run["tok_s"], 3) for run in found["runs"]] == list(PUBLISHED.values())
    for run in found["runs"]:
        assert run["lo"] < run["tok_s"] < run["hi"]
        assert run["block_lo"] < run["tok_s"] < run["block_hi"]
        assert run["loop_overhead_ms"] is run["reads_per_token"] is None
    assert [pair["separated"] for pair in found["pairs"]] == [False, *[True] * 5]
    for pair in found["pairs"]:
        assert pair["lo"] < pair["ratio"] < pair["hi"]
        assert {pair["a"], pair["b"]} < {str(path) for path in paths}
    assert {warning["kind"] for warning in found["warnings"]} == {"drop_rate", "warm_up", "drift"}


def test_the_table_fits_a_terminal_and_says_the_same(cli: Cli) -> None:
    out = cli("compare", *shared_runs()).out
    assert max(map(len, out.splitlines())) <= 80
    rates = [line.split()[2] for line in out.splitlines() if line[:3] in ("  A", "  B", "  C")]
    assert rates[:3] == ["2.549", "2.564", "3.938"]
    assert out.count("not separated") == 1
    assert "--skip 221 cuts that off, from every run" in " ".join(out.split())


def test_a_run_compares_with_itself_and_alone(two: list[Path], cli: Cli) -> None:
    pair = json.loads(cli("compare", two[1], two[1], "--json").out)["pairs"][0]
    assert pair["ratio"] == 1
    assert not pair["separated"]
    alone = cli("compare", two[1])
    assert alone.status == 0
    assert "Pairs" not in alone.out


def test_one_token_has_no_interval(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "one.csv"
    path.write_text(metrics_text([5.0]))
    found = json.loads(cli("compare", path, path, "--json").out)
    assert found["runs"][0]["lo"] is found["pairs"][0]["hi"] is None
    assert "A       1  200.000           –          –" in cli("compare", path).out
    assert "too few tokens" in cli("compare", path, path).out


def test_names_and_values_cannot_command_the_terminal(
    two: list[Path],
    cli: Cli,
) -> None:
    for found in (cli("compare", *two), cli("compare", *two, "--json")):
        assert not {"\x1b", "\x9b"} & set(found.out)
    assert cli("compare", *two, "--json").out.isascii()


def test_many_runs_take_no_time_that_a_person_feels(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "a.csv"
    path.write_text(metrics_text(STEADY * 8))
    started = time.process_time()
    found = cli("compare", *[path] * 30)
    assert time.process_time() - started < 15
    assert max(map(len, found.out.splitlines())) <= 80
    assert "\n  AD  " in found.out


@pytest.mark.parametrize("name", ["p.png", "p.SVG"])
def test_a_plot_is_drawn_beside_the_table(
    name: str,
    two: list[Path],
    tmp_path: Path,
    cli: Cli,
) -> None:
    pytest.importorskip("matplotlib")
    found = cli("compare", *two, "--plot", tmp_path / name)
    assert found.status == 0
    assert "separated" in found.out
    start = (tmp_path / name).read_bytes()[:200]
    assert b"PNG" in start or b"<?xml" in start


def test_a_plot_of_unknown_figures_is_drawn(tmp_path: Path, cli: Cli) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "bare$x$.csv").write_text("wall_ms\n5\n6\n")
    found = cli("compare", tmp_path / "bare$x$.csv", "--plot", tmp_path / "p.png")
    assert (found.status, (tmp_path / "p.png").exists()) == (0, True)


def test_mistakes_are_told_and_leave_no_plot(
    two: list[Path],
    tmp_path: Path,
    cli: Cli,
) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text("wall_ms\nnan\n")
    found = cli("compare", two[1], bad, "--plot", tmp_path / "p.png")
    assert (found.status, found.out) == (2, "")
    assert f"{bad}, line 2, wall_ms: 'nan' is no number" in found.err
    assert not (tmp_path / "p.png").exists()
    assert "--plot" not in cli("compare", two[1], "--plot", tmp_path / "p.pdf").out
    assert cli("compare", two[1], "--plot", tmp_path / "p.pdf").status == 2
    assert cli("compare").status == 2
    assert "--skip" in cli("compare", two[1], "--skip", "-1").err
    assert "of which --skip 80 leaves none" in cli("compare", two[1], "--skip", "80").err


def test_own_runs_leave_nothing_unchecked(
    tiny_model: Tiny,
    tmp_path: Path,
    cli: Cli,
) -> None:
    path = tmp_path / "own.csv"
    arguments = ("-p", "a", "-n", "40", "--csv", path, "--json", *SMALL)
    ran = json.loads(cli("run", tiny_model(), *arguments).out)
    found = json.loads(cli("compare", path, path, "--json").out)
    assert found["unchecked"] == {}
    assert found["runs"][0]["tokens"] == 39
    assert found["runs"][0]["tok_s"] == pytest.approx(ran["tok_s"], rel=1e-3)
    assert found["runs"][0]["hit_pct_includes_prompt"] is False
    spent = [found["runs"][0][f"{part}_ms"] for part in ("compute", "wait", "mgmt")]
    spent.append(found["runs"][0]["loop_overhead_ms"])
    assert sum(spent) == pytest.approx(1000 / found["runs"][0]["tok_s"], rel=1e-3)
