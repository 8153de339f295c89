"""What `tuiwork replay` shows: the table, the document, the plot."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path

import pytest

from engine.errors import InputError
from engine.replay_cache import POLICIES
from tests.route_samples import EXCERPT, SHARED, decode_rows, needs_shared, trace_text
from tuiwork.replay_view import run


def shown(path: Path, *, as_json: bool = False, budgets: list[int] | None = None) -> str:
    out = io.StringIO()
    run(path, json=as_json, plot=None, budgets=budgets, out=out)
    return out.getvalue()


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A trace with the necessary columns only, of a model with a hostile name."""
    path = tmp_path / "bare.csv"
    path.write_text(
        trace_text(
            ["0,1,0,0,0,0", "0,1,0,0,1,1"],
            header="turn,phase,step,layer,slot,expert",
            shape="# model=a\x9b31mb arch= n_layer=2 n_expert=8 n_expert_used=2",
        ),
        encoding="utf-8",
    )
    return path


def test_the_document_has_every_key_and_unrounded_values() -> None:
    found = json.loads(shown(EXCERPT, as_json=True, budgets=[100, 50]))
    assert list(found) == [
        *("trace", "cache_curve", "over_budget", "drop_curve", "topk_curve", "drop_dynamic"),
        *("substitute_curve", "topk_dynamic", "predictors", "popularity", "notes"),
    ]
    curve = found["cache_curve"]
    assert [point["budget_mib"] for point in curve] == [50] * 7 + [100] * 7
    assert [point["policy"] for point in curve] == list(POLICIES) * 2
    assert set(curve[0]) == {"budget_mib", "policy", "hit_pct"}
    assert set(found["drop_curve"][0]) == {"frac", "io_saved_pct", "mass_lost_pct"}
    assert [point["frac"] for point in found["drop_curve"]] == [0.25, 0.5, 0.75, 1.0]
    assert set(found["topk_curve"][0]) == {"k", "io_saved_pct", "mass_lost_pct"}
    assert [point["k"] for point in found["topk_curve"]] == [5, 4, 3, 2, 1]
    assert found["trace"]["hit_pct"] == pytest.approx(70.05208333333333, abs=1e-12)
    assert found["trace"]["drop_pct"] is None
    assert found["trace"]["n_moe_layer"] == 4
    assert found["popularity"][0]["layer"] == 0
    assert len(found["popularity"][0]["counts"]) == 128
    assert [judged["predictor"] for judged in found["predictors"]] == [
        *("previous", "popular-so-far", "popular-overall")
    ]
    assert {(p["budget_mib"], p["policy"]) for p in found["over_budget"]} == {
        *((50, "layer-lru"), (50, "layer-lfu"))
    }


def test_the_table_says_the_same_as_the_document() -> None:
    found = json.loads(shown(EXCERPT, as_json=True, budgets=[50, 100]))
    lines = shown(EXCERPT, budgets=[50, 100]).splitlines()
    for budget in (50, 100):
        row = next(line.split() for line in lines if line.split()[:1] == [str(budget)])
        figures = [p["hit_pct"] for p in found["cache_curve"] if p["budget_mib"] == budget]
        assert [cell.rstrip("*") for cell in row[1:]] == [f"{pct:.1f}" for pct in figures]
        assert [cell.endswith("*") for cell in row[1:]] == [
            *(False, False, False, budget == 50, budget == 50, False, False)
        ]
    assert "  * held more than the budget: a cache keeps what the layer's last call needed" in lines


@pytest.mark.parametrize("budgets", [None, [50, 100], list(range(10, 200, 10))])
def test_the_table_fits_a_terminal(budgets: list[int] | None) -> None:
    assert max(map(len, shown(EXCERPT, budgets=budgets).splitlines())) <= 80


def test_unavailable_is_a_dash_or_null_but_never_zero(bare: Path) -> None:
    text = shown(bare, budgets=[10])
    assert "hits – %, dropped – %, substituted – %, read – MiB" in text
    assert "0.75      –     –" in text
    found = json.loads(shown(bare, as_json=True, budgets=[10]))
    for key in ("drop_curve", "drop_dynamic", "substitute_curve"):
        assert {point["io_saved_pct"] for point in found[key]} == {None}
    assert [point["hit_pct"] for point in found["cache_curve"]] == [0.0] * 7
    assert found["trace"]["hit_pct"] is None


def test_a_models_name_cannot_command_the_terminal(bare: Path) -> None:
    assert "\x9b" not in shown(bare, budgets=[10])
    assert shown(bare, as_json=True, budgets=[10]).isascii()


def test_a_top_1_model_has_no_fewer_experts(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(trace_text(decode_rows([[0], [1]], weights=("1",))))
    assert "Fewer experts" not in shown(path)
    assert json.loads(shown(path, as_json=True))["topk_curve"] == []


@pytest.mark.parametrize("name", ["plot.png", "plot.SVG"])
def test_a_plot_is_drawn_beside_the_table(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = io.StringIO()
    run(EXCERPT, json=False, plot=tmp_path / name, budgets=[50, 100], out=out)
    start = (tmp_path / name).read_bytes()[:200]
    assert (
        start.startswith(b"\x89PNG")
        if name.endswith("png")
        else b"<svg" in start or b"<?xml" in start
    )
    assert "belady" in out.getvalue()


def test_a_plot_of_unknown_figures_is_drawn(bare: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run(bare, json=True, plot=tmp_path / "p.svg", budgets=[10], out=io.StringIO())
    assert (tmp_path / "p.svg").stat().st_size > 0


def test_a_plot_that_cannot_be_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = tmp_path / "none.csv"
    with pytest.raises(InputError, match=r"p\.pdf: a plot is written as \.png or \.svg"):
        run(nowhere, json=False, plot=Path("p.pdf"), budgets=None, out=io.StringIO())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match="a plot needs matplotlib, which is not installed"):
        run(nowhere, json=False, plot=Path("p.png"), budgets=None, out=io.StringIO())


def test_a_plot_into_no_folder_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(InputError, match="the plot cannot be written"):
        run(EXCERPT, json=False, plot=tmp_path / "no" / "p.png", budgets=[50], out=io.StringIO())


@needs_shared
def test_the_whole_command_takes_less_than_ten_seconds() -> None:
    started = time.process_time()
    found = json.loads(shown(SHARED, as_json=True))
    assert time.process_time() - started < 10
    assert len(found["cache_curve"]) == 11 * len(POLICIES)
