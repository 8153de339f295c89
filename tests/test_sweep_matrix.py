"""What a sweep's file and flags mean, in which order cells run, and what a mistake says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InputError
from engine.machine_state import CoolDown, MachineState, wait_until_cool
from tests.commandline import Cli, cli, own_home
from tests.sweep_samples import arm, plan
from tuiwork.sweep.forecast import Forecast
from tuiwork.sweep.matrix import make_arms, make_plan, parse_cool_down, parse_vary, read_sweep
from tuiwork.sweep.plan import Plan

__all__ = ["cli", "own_home"]  # fixtures


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file that stands for a model; nobody opens it."""
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF")
    return path


@pytest.fixture
def sweep_file(tmp_path: Path, model: Path) -> Path:
    (tmp_path / "mine.toml").write_text("[stream]\nio-threads = 2\n")
    (tmp_path / "long.txt").write_text("a long prompt")
    path = tmp_path / "sweep.toml"
    path.write_text(
        f"""
        description = "what dropping buys"
        model = "{model.name}"
        profiles = ["default", "mine.toml"]
        prompts = ["why?", {{ file = "long.txt" }}]
        rounds = 3
        [settings]
        n-predict = 64
        [matrix]
        drop-cold-experts = [0, 0.75]
        stream.cache-mb = [1500, "auto"]
        [cool-down]
        max-load = 1
        """
    )
    return path


class TestOrder:
    def test_arms_alternate_and_every_second_round_goes_backwards(self) -> None:
        assert [cell.id for cell in plan(rounds=3).cells] == [
            *("r1-p1-A", "r1-p1-B", "r1-p2-A", "r1-p2-B"),
            *("r2-p2-B", "r2-p2-A", "r2-p1-B", "r2-p1-A"),
            *("r3-p1-A", "r3-p1-B", "r3-p2-A", "r3-p2-B"),
        ]

    @given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 5))
    def test_every_cell_runs_once(self, n_arms: int, n_prompts: int, rounds: int) -> None:
        arms = tuple(arm(f"A{n}", {}) for n in range(n_arms))
        cells = Plan(arms, ("x",) * n_prompts, rounds).cells
        assert len({cell.id for cell in cells}) == len(cells) == n_arms * n_prompts * rounds

    def test_a_plan_comes_back_from_json(self) -> None:
        before = plan(cool_down=CoolDown(max_load=1.0), models={"/m/a.gguf": (4, 5)})
        assert Plan.from_document(json.loads(json.dumps(before.document()))) == before


class TestFile:
    def test_every_part_is_understood(self, sweep_file: Path, model: Path) -> None:
        wishes = read_sweep(sweep_file)
        found = make_plan(wishes, make_arms(wishes))
        assert found.description == "what dropping buys"
        assert found.prompts == ("why?", "a long prompt")
        assert (found.rounds, len(found.arms), len(found.cells)) == (3, 8, 48)
        assert [a.letter for a in found.arms] == list("ABCDEFGH")
        assert found.arms[0].name == "default drop-cold-experts=0 cache-mb=1500"
        last = found.arms[-1]
        assert last.name == "mine drop-cold-experts=0.75 cache-mb=auto"
        assert last.settings["stream.io-threads"] == 2
        assert last.settings["run.n-predict"] == 64
        assert last.settings["model.path"] == str(model)
        assert found.cool_down == CoolDown(max_load=1.0)
        assert found.models == {str(model): (4, model.stat().st_mtime_ns)}

    def test_several_matrices_stand_beside_each_other(self, tmp_path: Path) -> None:
        path = tmp_path / "s.toml"
        path.write_text("[[matrix]]\ncache-mb = [0]\n[[matrix]]\nio-threads = [1, 2]\n")
        arms = make_arms(read_sweep(path))
        assert [a.name for a in arms] == ["cache-mb=0", "io-threads=1", "io-threads=2"]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("[matrix]\ncahce-mb = [1]", ":2: there is no setting 'cahce-mb'; did you mean "),
            ("[matrix]\nstream.cahce-mb = [1]", ":2: there is no setting 'stream.cahce-mb'"),
            ("promts = ['x']\nrounds = 1", ":1: a sweep has no 'promts'; did you mean prompts?"),
            ("rounds = 1\n[stream]\ncache-mb = 0", "settings of every run go below [settings]"),
            ("[matrix]\ncache-mb = 4000", ":2: stream.cache-mb is 4000, not a list of values"),
            ("[matrix]\ncache-mb = []", ":2: stream.cache-mb is [], not a list of values"),
            ("[matrix]\ncache-mb = ['x']", ":2: stream.cache-mb: 'x' is not allowed"),
            ("[matrix]\nmodel.path = ['x']", ":2: model.path is not varied here"),
            ("matrix = 4", ":1: write [matrix] on a line of its own"),
            ("rounds = 0", ":1: rounds is 0, not a whole number from 1 to 1000"),
            ("rounds = true", ":1: rounds is True, not a whole number"),
            ("prompts = ['x', 3]", ":1: a prompt is 3; allowed is a text"),
            ("prompts = [' ']", ":1: a prompt is empty"),
            ("prompts = [{ file = 'none.txt' }]", ":1: "),
            ("profiles = 'x'", ":1: profiles is 'x', not a list of texts"),
            ("profiles = ['nosuch']", "there is no profile 'nosuch'"),
            ("[settings]\nn-predict = 0", ":2: run.n-predict: 0 is out of range"),
            ("[cool-down]\nmax-laod = 1", ":2: there is no condition 'max-laod'; did you mean max"),
            ("[cool-down]\nmax-load = -1", ":2: max-load is -1, not a number from 0 on"),
            ("rounds = 1\nrounds = 2", ":2: is not valid TOML"),
        ],
    )
    def test_a_mistake_names_its_place(self, tmp_path: Path, text: str, message: str) -> None:
        path = tmp_path / "s.toml"
        path.write_text(text)
        with pytest.raises(InputError) as caught:
            read_sweep(path)
        assert message in str(caught.value)

    def test_a_combination_that_cannot_run_is_refused_before_any_runs(self, model: Path) -> None:
        from tuiwork.sweep.matrix import Wishes

        matrix: dict[str, list[Any]] = {
            "stream.cache-mb": [0],
            "routing.drop-cold-experts": [0.0, 0.5],
        }
        with pytest.raises(InputError, match=r"needs the cache.*in the combination .*cache-mb=0"):
            make_arms(Wishes(matrices=[matrix], model=str(model)))


class TestFlags:
    def test_vary(self) -> None:
        assert parse_vary("cache-mb=1500,auto") == ("stream.cache-mb", [1500, "auto"])
        assert parse_vary("drop-cold-experts=0,0.5") == ("routing.drop-cold-experts", [0.0, 0.5])
        assert parse_vary("drop-renorm=true, false") == ("routing.drop-renorm", [True, False])

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("cache-mb", "write it as key=value,value"),
            ("cache-mb=", "write it as key=value,value"),
            ("cahce-mb=1", "there is no setting 'cahce-mb'; did you mean stream.cache-mb?"),
            ("io-threads=1,,2", "stream.io-threads: '' is"),
            ("prompt=a,b", "run.prompt is not varied here"),
        ],
    )
    def test_a_bad_vary_says_what_is_allowed(self, text: str, message: str) -> None:
        with pytest.raises(InputError) as caught:
            parse_vary(text)
        assert message in str(caught.value)

    def test_cool_down(self) -> None:
        conditions = ("max-temperature", "max-load", "min-available-mb", "give-up-after")
        values = dict(parse_cool_down(f"{name}=60") for name in conditions)
        assert set(dataclasses.asdict(CoolDown(**values)).values()) == {60.0}
        for text in ("load", "max-load=x", "max-load=nan", "max-load=inf"):
            with pytest.raises(InputError):
                parse_cool_down(text)

    def test_flags_go_over_the_file(self, sweep_file: Path, cli: Cli) -> None:
        found = cli(
            *("sweep", sweep_file, "-p", "only this", "--rounds", "1"),
            *("--vary", "cache-mb=0", "--vary", "drop-cold-experts=0", "--dry-run"),
        )
        assert found.status == 0
        assert found.out.splitlines()[-1] == "r1-p1-A r1-p1-B"
        assert "B  mine drop-cold-experts=0 cache-mb=0" in found.out

    def test_profiles_are_run_side_by_side(self, model: Path, cli: Cli) -> None:
        found = cli("sweep", model, "default", "fast-lossy", "-p", "x", "--dry-run")
        assert found.out.splitlines()[:2] == ["A  default", "B  fast-lossy"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((), "give a prompt: -p TEXT"),
            (("-p", ""), "--prompt: a prompt is empty"),
            (("-p", "x", "nosuch"), "there is no profile 'nosuch'"),
            (("-p", "x", "other.gguf"), "other.gguf: is a second model"),
            (("-p", "x", "--vary", "cahce-mb=1"), "did you mean stream.cache-mb?"),
            (("-p", "x", "--rounds", "0"), "--rounds"),
            (("-p", "x", "--vary", "seed=" + ",".join(map(str, range(9999)))), "at most 10000"),
            (("-p", "x", "--resume", "y"), "--resume goes on with what the folder's sweep runs"),
            (("-p", "x", "--quality", "none.json"), "--quality none.json: cannot be read"),
            (("-p", "x", "--dask", "local:x"), "--dask local:x: write local:N"),
        ],
    )
    def test_mistakes_are_told_before_anything_runs(
        self, model: Path, tmp_path: Path, arguments: tuple[str, ...], message: str, cli: Cli
    ) -> None:
        found = cli("sweep", model, "--out", tmp_path / "out", *arguments)
        assert found.status == 2
        assert message in found.err
        assert not (tmp_path / "out").exists()

    def test_a_missing_model_is_named(self, tmp_path: Path, cli: Cli) -> None:
        found = cli("sweep", tmp_path / "none.gguf", "-p", "x", "--out", tmp_path / "out")
        assert (found.status, "the model cannot be read" in found.err) == (2, True)


class TestCoolDown:
    class Clock:
        """Time that passes by sleeping, and a machine that cools by one degree a second."""

        def __init__(self, temperature: float | None) -> None:
            self.seconds = 0.0
            self.temperature = temperature

        def __call__(self) -> float:
            return self.seconds

        def sleep(self, seconds: float) -> None:
            self.seconds += max(seconds, 0.01)

        def state(self) -> MachineState:
            warm = None if self.temperature is None else self.temperature - self.seconds
            return MachineState(8000.0, None, warm, 0.5)

    def waited(self, clock: Clock, cool_down: CoolDown) -> tuple[float, bool, tuple[str, ...]]:
        found = wait_until_cool(cool_down, now=clock.state, clock=clock, sleep=clock.sleep)
        return round(found.seconds), found.gave_up, found.unmet

    def test_it_waits_until_the_condition_holds(self) -> None:
        assert self.waited(self.Clock(70), CoolDown(max_temperature_c=60)) == (10, False, ())

    def test_giving_up_is_recorded_with_what_did_not_hold(self) -> None:
        found = self.waited(self.Clock(70), CoolDown(max_temperature_c=60, give_up_s=4))
        assert found == (4, True, ("temperature 66 °C > 60 °C",))

    def test_what_is_not_measured_is_not_waited_for(self) -> None:
        found = self.waited(self.Clock(None), CoolDown(max_temperature_c=60))
        assert found == (0, True, ("temperature is not measured here",))
        with pytest.raises(InputError, match="temperature is not measured here"):
            CoolDown(max_temperature_c=60).require_measured(self.Clock(None).state())

    def test_without_a_condition_nobody_waits(self) -> None:
        assert self.waited(self.Clock(99), CoolDown()) == (0, False, ())

    def test_memory_and_load_count_too(self) -> None:
        unmet = CoolDown(max_load=0.25, min_available_mib=9000).unmet(self.Clock(1).state())
        assert unmet == ["load 0.5 > 0.25", "available memory 8000 MiB < 9000 MiB"]

    def test_the_state_of_this_machine_is_told(self) -> None:
        state = MachineState.now()
        assert state.available_mib is not None
        assert state.available_mib > 0
        assert state.load is None or state.load >= 0


def test_time_left_is_that_of_the_arms_that_are_left() -> None:
    now = [0.0]
    cells = plan().cells
    forecast = Forecast(cells, clock=lambda: now[0])
    assert forecast.left_s() is None
    forecast.finish(cells[0], 10.0)
    assert forecast.left_s() == pytest.approx(70)
    forecast.finish(cells[1], 2.0)
    assert forecast.left_s() == pytest.approx(3 * 10 + 3 * 2)
    now[0] = 4.0
    assert forecast.left_s() == pytest.approx(32)
    again = Forecast(cells[2:], [(cells[0], 10.0), (cells[1], 2.0)], clock=lambda: now[0])
    assert again.left_s() == pytest.approx(36)
