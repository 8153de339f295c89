"""What a sweep's finished cells say together: pooling, the front, the report, its folder."""

from __future__ import annotations

import errno
import html
import json
import os
from pathlib import Path
from typing import Any

import pytest

from engine.errors import InputError
from tests.commandline import Cli, cli, own_home
from tests.sweep_samples import arm, finish, folder_with, plan
from tuiwork.sweep.quality import KL, MASS, front, read_quality
from tuiwork.sweep.report import write_report
from tuiwork.sweep.results import SweepResult, collect
from tuiwork.sweep.runner import Runner
from tuiwork.sweep.store import Store
from tuiwork.sweep.summary import summary

__all__ = ["cli", "own_home"]  # fixtures

PLAN = plan()


def ran(folder: Path, **of_b: Any) -> Store:
    """A folder in which every cell ran, arm B in half of A's time."""
    store = folder_with(folder, PLAN)
    for cell in PLAN.cells:
        is_b = cell.arm.letter == "B"
        dropped = {"experts_dropped": 4, "mass_discarded": 1.0} if is_b else {}
        finish(store, cell, 50.0 if is_b else 100.0, **{**dropped, **(of_b if is_b else {})})
    return store


def results(store: Store, skip: int = 0) -> SweepResult:
    return collect(PLAN, store.finished(PLAN), store.failures(PLAN), skip)


class TestResults:
    def test_an_arms_tokens_are_pooled_over_its_cells(self, tmp_path: Path) -> None:
        found = results(ran(tmp_path))
        first, second = found.arms
        assert (len(first.pooled), len(second.pooled)) == (320, 320)
        assert first.pooled.rate.tok_s == pytest.approx(1000 / 105)
        assert found.pairs[0].ratio == pytest.approx(2)
        assert found.pairs[0].separated
        assert found.paired_ratios(0, 1) == pytest.approx([2.0] * 4)
        assert second.pooled.drop_pct == pytest.approx(25)
        assert found.missing == 0
        assert found.doubts == []

    def test_skipped_tokens_are_skipped_in_every_cell(self, tmp_path: Path) -> None:
        assert len(results(ran(tmp_path), skip=30).arms[0].pooled) == 200

    def test_arms_that_are_not_comparable_are_named(self, tmp_path: Path) -> None:
        found = results(ran(tmp_path, preamble={"threads": 4}, tokens=60))
        assert "different numbers of threads: 2 (A); 4 (B)" in found.doubts
        assert "fewer than 64 tokens: B in 4 of 4 cells" in found.doubts

    def test_cells_that_contradict_the_tokens_are_named(self, tmp_path: Path) -> None:
        store = folder_with(tmp_path, PLAN)
        for cell in PLAN.cells:
            slow = cell.arm.letter == "B" and cell.id.startswith("r2-p1")
            finish(store, cell, 150.0 if slow else 50.0 if cell.arm.letter == "B" else 100.0)
        doubts = results(store).doubts
        assert any("1 of 4 pairs of cells say the contrary" in doubt for doubt in doubts)

    def test_a_single_cell_is_not_taken_for_a_setting(self, tmp_path: Path) -> None:
        store = folder_with(tmp_path, PLAN)
        for cell in PLAN.cells[:2]:
            finish(store, cell, 50.0)
        assert any(words.startswith("a single cell (A, B)") for words in results(store).doubts)

    def test_several_machines_and_given_up_cool_downs_are_named(self, tmp_path: Path) -> None:
        waited = {"seconds": 9, "gave_up": True, "unmet": ["load 2 > 1"]}
        record = {"host": "there", "at_once": 2, "cool_down": waited}
        doubts = results(ran(tmp_path, record=record)).doubts
        assert "ran on 2 machines: here, there" in doubts
        assert any(doubt.startswith("up to 2 cells ran at once") for doubt in doubts)
        assert any(doubt.startswith("began although the cool-down") for doubt in doubts)


class TestFront:
    def test_without_measured_quality_it_is_the_weight_left_out(self, tmp_path: Path) -> None:
        found = front(results(ran(tmp_path)).arms, None)
        assert found.measure == MASS
        assert [point.cost for point in found.points] == pytest.approx([0.0, 12.5])
        assert [point.on_front for point in found.points] == [True, True]

    def test_slower_and_dearer_is_not_worth_having(self, tmp_path: Path) -> None:
        store = folder_with(tmp_path, PLAN)
        for cell in PLAN.cells:
            finish(store, cell, 100.0, experts_dropped=4, mass_discarded=1.0)
        points = front(results(store).arms, None).points
        assert [point.on_front for point in points] == [True, False]

    def test_measured_quality_is_found_by_the_settings(self, tmp_path: Path) -> None:
        path = tmp_path / "q.json"
        entry = {
            "name": "drop 0.75",
            "settings": {"routing.drop-cold-experts": 0.75},
            **{"kl_mean": 0.02, "kl_lo": 0.01, "kl_hi": 0.03},
        }
        path.write_text(json.dumps({"model": {"path": "/else/a.gguf"}, "settings": [entry]}))
        found = front(results(ran(tmp_path / "s")).arms, read_quality(path))
        assert found.measure == KL
        assert [(point.cost, point.cost_high) for point in found.points] == [
            (0, None),
            (0.02, 0.03),
        ]
        assert found.note == ""
        told = {"config": {"stream": {"cache-mb": 4000}}, "settings": [entry]}
        path.write_text(json.dumps(told))
        note = front(results(Store(tmp_path / "s")).arms, read_quality(path)).note
        assert note.endswith("run with another: B")
        path.write_text(json.dumps({"model": {"path": "/else/b.gguf"}, "settings": [entry]}))
        assert front(results(Store(tmp_path / "s")).arms, read_quality(path)).unknown == ("B",)

    def test_fewer_experts_have_no_known_weight(self, tmp_path: Path) -> None:
        other = plan(arms=(arm("A", {}), arm("B", {"routing.n-expert-used": 1})))
        store = folder_with(tmp_path, other)
        for cell in other.cells:
            finish(store, cell, 100.0, mass_discarded=0.0)
        found = front(collect(other, store.finished(other), {}).arms, None)
        assert found.unknown == ("B",)

    @pytest.mark.parametrize(
        "text",
        [
            *("", "[]", "{}", '{"settings": [{}]}', '{"settings": 3}'),
            *('{"settings": [{"kl_mean": -1}]}', '{"settings": [{"kl_mean": NaN}]}'),
            '{"settings": [{"kl_mean": 1, "settings": {"x": 1}}]}',
        ],
    )
    def test_another_document_is_refused(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "q.json"
        path.write_text(text)
        with pytest.raises(InputError, match="is not what `tuiwork quality --json` writes"):
            read_quality(path)


class TestReport:
    def written(self, store: Store) -> tuple[str, str]:
        found = results(store)
        write_report(store, found, front(found.arms, None), "tuiwork sweep --resume x")
        page = (store.folder / "report.html").read_text()
        return (store.folder / "report.md").read_text(), page

    def test_both_reports_carry_the_figures(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        store = ran(tmp_path / "s")
        for text in self.written(store):
            for figure in ("9.524", "19.048", "2.000", "12.50", "4 of 4", "separated"):
                assert figure in text
            assert "8 of 8 cells have run" in text
        for name in ("rates", "pareto", "times", "state"):
            assert (store.folder / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
            assert f"(plots/{name}.png)" in (store.folder / "report.md").read_text()

    def test_what_is_missing_or_failed_is_told(self, tmp_path: Path) -> None:
        store = folder_with(tmp_path, PLAN)
        for cell in PLAN.cells[:2]:
            finish(store, cell, 50.0)
        store.fail(PLAN.cells[2], "the model is gone")
        for text in self.written(store):
            assert "6 cells are missing." in text
            assert "tuiwork sweep --resume x" in text
            assert "r1-p2-A failed: the model is gone" in text

    def test_texts_of_others_are_shown_and_not_obeyed(self, tmp_path: Path) -> None:
        nasty = "<script>x</script> | *b* `c` [d](e)\n# f \x1b[2J"
        bad = plan(prompts=(nasty, "how?"), description=nasty)
        store = folder_with(tmp_path, bad)
        for cell in bad.cells:
            finish(store, cell, 50.0, record={"host": nasty})
        found = collect(bad, store.finished(bad), {})
        write_report(store, found, front(found.arms, None), "x")
        page = (tmp_path / "report.html").read_text()
        assert "<script>" not in page
        assert html.escape("<script>x</script>") in page
        text = (tmp_path / "report.md").read_text()
        assert "<script>" not in text.replace("\\<", "")
        assert "\n# f" not in text
        assert "\x1b" not in text + page

    def test_the_table_fits_a_terminal(self, tmp_path: Path) -> None:
        lines = summary(results(ran(tmp_path))).splitlines()
        assert max(map(len, lines)) <= 80
        assert any(line.split()[:4] == ["B", "4", "320", "19.048"] for line in lines)


class TestFolder:
    def test_a_cell_that_cannot_be_written_is_not_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = folder_with(tmp_path, PLAN)
        finish(store, PLAN.cells[0], 50.0)

        def full(_fd: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("engine.whole_file.os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            finish(store, PLAN.cells[1], 50.0)
        assert [path.name for path in store.cells_folder.iterdir()] == ["r1-p1-A"]

    def test_what_a_killed_sweep_left_is_thrown_away(self, tmp_path: Path) -> None:
        store = folder_with(tmp_path, PLAN)
        finish(store, PLAN.cells[0], 50.0)
        (store.cells_folder / ".new-r1-p1-B").mkdir()
        (store.cells_folder / ".new-r1-p1-B" / "tokens.csv").write_text("half")
        (tmp_path / ".plan.json.x").write_text("half")
        store.adopt(PLAN)
        assert [path.name for path in store.cells_folder.iterdir()] == ["r1-p1-A"]
        assert not (tmp_path / ".plan.json.x").exists()
        assert [cell.id for cell in Runner(PLAN, store).left] == [c.id for c in PLAN.cells[1:]]

    def test_another_sweeps_folder_is_left_alone(self, tmp_path: Path) -> None:
        store = folder_with(tmp_path, PLAN)
        with pytest.raises(InputError, match="belongs to another sweep"):
            store.adopt(plan(rounds=5))
        with pytest.raises(InputError, match="began with another state of the model"):
            store.adopt(plan(models={"/m/a.gguf": (1, 2)}))

    def test_a_folder_of_other_things_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("")
        with pytest.raises(InputError, match="holds other files and is no sweep's folder"):
            Store(tmp_path).prepare()
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]

    def test_a_folder_that_cannot_be_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        for folder in (tmp_path / "file" / "x", tmp_path / "file", Path("/proc/x")):
            with pytest.raises(InputError, match="a sweep cannot be kept there"):
                Store(folder).prepare()

    def test_two_sweeps_do_not_share_a_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tuiwork.sweep.store._ORPHAN_PATIENCE_S", 0.0)
        store = folder_with(tmp_path, PLAN)
        refused = pytest.raises(InputError, match=rf"another sweep \(process {os.getpid()}\)")
        with store.locked(), refused, Store(tmp_path).locked():
            pass
        with store.locked():
            pass

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"plan_version": 99}'])
    def test_a_damaged_plan_is_named(self, tmp_path: Path, text: str, cli: Cli) -> None:
        folder_with(tmp_path, PLAN)
        (tmp_path / "plan.json").write_text(text)
        found = cli("sweep", "--resume", tmp_path)
        assert found.status == 2
        assert "plan.json: is not the plan of a sweep that can go on" in found.err

    def test_a_damaged_cell_is_named(self, tmp_path: Path) -> None:
        store = ran(tmp_path)
        (store.cells_folder / "r1-p1-A" / "cell.json").write_text("{")
        with pytest.raises(InputError, match=r"r1-p1-A: is damaged .* delete the folder"):
            store.finished(PLAN)

    def test_no_sweep_to_go_on_with(self, tmp_path: Path, cli: Cli) -> None:
        found = cli("sweep", "--resume", tmp_path / "none")
        assert (found.status, "there is no sweep to go on with" in found.err) == (2, True)
        assert not (tmp_path / "none").exists()
