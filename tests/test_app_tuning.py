"""Turning knobs by value: steps, undo, what waits, what a change bought, profiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import SETTINGS, RunConfig, check_value, get
from engine.errors import InputError
from engine.messages import Finished, LiveChanged, LiveRefused, Text, TokenRows
from engine.profile import load_profile
from engine.results import Answer
from engine.stats import FEWEST_TOKENS
from tests.frozen_engine import FrozenEngine, token_row
from tuiwork.client import EngineNotRunning
from tuiwork.meters.glyphs import ASCII
from tuiwork.meters.meters import Meters
from tuiwork.meters.tokens import TokenHistory
from tuiwork.tuning import profiles
from tuiwork.tuning.changes import Change, ChangeLog, effect_text, interval_text, measure
from tuiwork.tuning.control import Tuner
from tuiwork.tuning.knobs import BY_KEY, KNOBS, Knob, split_live
from tuiwork.tuning.trial import Side, Trial
from tuiwork.tuning.undo import UndoStack

DROP, CACHE = "routing.drop-cold-experts", "stream.cache-mb"


def rows(n: int, *, drop: float = 0.0, seed: int = 4) -> list[Any]:
    random = np.random.default_rng(seed)
    return [token_row(step, random, drop=drop) for step in range(1, n + 1)]


class TestKnobs:
    @given(st.sampled_from(KNOBS), st.lists(st.sampled_from([-1, 1]), max_size=60))
    def test_every_step_is_a_value_that_can_be_had(self, knob: Knob, steps: list[int]) -> None:
        config = RunConfig().replace({CACHE: 4000, "model.threads": 2, "model.ctx": 4096})
        for direction in steps:
            value = knob.turned(config, direction, 8)
            assert check_value(SETTINGS[knob.key], value) is None
            config = config.replace({knob.key: value})

    def test_up_and_down_again_is_where_one_began(self) -> None:
        config = RunConfig()
        for _ in range(15):
            config = config.replace({DROP: BY_KEY[DROP].turned(config, 1, 8)})
        assert get(config, DROP) == 0.75
        for _ in range(99):
            config = config.replace({DROP: BY_KEY[DROP].turned(config, -1, 8)})
        assert get(config, DROP) == 0.0

    def test_experts_per_token_end_at_the_models_own(self) -> None:
        knob, config = BY_KEY["routing.n-expert-used"], RunConfig()
        assert knob.turned(config, 1, 8) == 0
        assert knob.turned(config, -1, 8) == 7
        assert knob.turned(config.replace({knob.key: 7}), 1, 8) == 0
        assert knob.turned(config.replace({knob.key: 1}), -1, 8) == 1

    def test_a_cache_too_small_is_not_offered(self) -> None:
        config = RunConfig().replace({CACHE: 1500})
        assert BY_KEY[CACHE].turned(config, -1, 8) == 1500
        forced = RunConfig().replace({CACHE: 16, "stream.force-cache": True})
        assert BY_KEY[CACHE].turned(forced, -1, 8) == 14

    def test_knows_what_the_engine_takes_live(self) -> None:
        changes = {CACHE: "auto", "sampling.temp": 1, "model.ctx": 1}
        assert split_live(changes) == ({CACHE: "auto", "sampling.temp": 1}, {"model.ctx": 1})
        assert all(knob.reopens == bool(split_live({knob.key: 1})[1]) for knob in KNOBS)

    def test_lossy_knobs_are_marked(self) -> None:
        assert {knob.key for knob in KNOBS if knob.lossy} == {
            DROP,
            "routing.cold-policy",
            "routing.n-expert-used",
        }


class TestUndo:
    @given(st.lists(st.sampled_from(["set", "undo", "redo"]), max_size=40))
    def test_undo_and_redo_walk_one_line(self, steps: list[str]) -> None:
        stack, value, line, at = UndoStack(), 0, [0], 0
        for step in steps:
            if step == "set":
                stack.push({"x": value}, {"x": value + 100})
                value += 100
                line, at = [*line[: at + 1], value], at + 1
            else:
                changes = stack.undo() if step == "undo" else stack.redo()
                if changes is not None:
                    at += -1 if step == "undo" else 1
                    value = changes["x"]
            assert value == line[at]
            assert stack.can_undo == (at > 0)
            assert stack.can_redo == (at + 1 < len(line))


class TestChanges:
    def test_says_what_it_waits_for(self) -> None:
        change = Change({DROP: 0.5}, {DROP: 0.75}, 20, 20)
        assert change.title() == "drop 0.50 → 0.75"
        assert change.title(ASCII) == "drop 0.50 -> 0.75"
        assert effect_text(change, measure(rows(20), rows(7))).startswith("7 of 16 tokens")
        assert "only 3 tokens" in effect_text(change, measure(rows(3), rows(90)))

    def test_tells_the_speed_whether_it_is_chance_and_the_reads(self) -> None:
        change = Change({DROP: 0.0}, {DROP: 0.75}, 60, 60)
        effect = measure(rows(60), rows(60, drop=0.75))
        text = effect_text(change, effect)
        assert "tok/s, separated" in text
        assert "reads −" in text
        assert "left out 8.9 %" in text
        assert interval_text(effect).startswith("×1.")
        assert "−" not in effect_text(change, effect, ASCII)

    def test_no_difference_is_not_separated(self) -> None:
        change = Change({"sampling.temp": 0.0}, {"sampling.temp": 0.8}, 60, 60)
        text = effect_text(change, measure(rows(60, seed=1), rows(60, seed=2)))
        assert "not separated" in text
        assert "left out" not in text

    def test_a_busy_machine_is_told_from_what_the_change_did(self) -> None:
        change = Change({DROP: 0.0}, {DROP: 0.5}, 60, 60)
        before, after = rows(60, seed=1), rows(60, seed=2)
        assert "other programs" not in effect_text(change, measure(before, after))
        for row in before:
            row.wall_ms += 2 * row.compute_ms
            row.compute_ms *= 3
        assert "after: other programs were at work" in effect_text(change, measure(before, after))
        fewer = Change({"routing.n-expert-used": 8}, {"routing.n-expert-used": 4}, 60, 60)
        assert "other programs" not in effect_text(fewer, measure(before, after))

    def test_quick_steps_of_one_knob_are_one_change(self) -> None:
        log = ChangeLog()
        for step, at_row in enumerate((40, 41, 44)):
            log.add({DROP: step / 10}, {DROP: (step + 1) / 10}, at_row)
        assert len(log.changes) == 1
        assert log.changes[0].title() == "drop 0.00 → 0.30"
        tokens = TokenHistory()
        tokens.extend(rows(80))
        effect = log.effect(0, tokens)
        # Of the first 40 half are left out: they met an empty cache.
        assert (effect.n_before, effect.n_after) == (20, 36)

    def test_a_step_taken_back_at_once_leaves_no_mark(self) -> None:
        log = ChangeLog()
        log.add({DROP: 0.1}, {DROP: 0.2}, 40)
        log.add({DROP: 0.2}, {DROP: 0.1}, 41)
        assert log.changes == []

    def test_a_change_is_judged_between_its_neighbours(self) -> None:
        log = ChangeLog()
        log.add({DROP: 0.0}, {DROP: 0.5}, 30)
        log.add({CACHE: 4000}, {CACHE: 2000}, 70)
        tokens = TokenHistory()
        tokens.extend(rows(100))
        first, second = log.effect(0, tokens), log.effect(1, tokens)
        assert (first.n_before, first.n_after) == (15, 40)
        assert (second.n_before, second.n_after) == (40, 30)

    def test_a_cold_start_does_not_flatter_the_first_change(self) -> None:
        log, tokens = ChangeLog(), TokenHistory()
        cold, warm = rows(20), rows(60)
        for row in cold:
            row.wall_ms *= 9
        tokens.extend([*cold, *warm])
        log.add({DROP: 0.0}, {DROP: 0.1}, 40)
        speed = log.effect(0, tokens).speed
        assert speed is not None
        assert not speed.separated

    def test_intervals_are_not_computed_for_every_token(self) -> None:
        log, tokens = ChangeLog(), TokenHistory()
        tokens.extend(rows(40))
        log.add({DROP: 0.0}, {DROP: 0.5}, 40)
        tokens.extend(rows(100))
        first = log.effect(0, tokens)
        tokens.extend(rows(2))
        assert log.effect(0, tokens) is first
        tokens.extend(rows(40))
        assert log.effect(0, tokens) is not first
        assert first.n_after == 100 >= FEWEST_TOKENS


class Refusing:
    """Takes no settings."""

    def set_live(self, changes: dict[str, Any]) -> int:
        raise EngineNotRunning


class TestTuner:
    def tuner(self) -> tuple[Tuner, FrozenEngine, Meters, list[str]]:
        heard: list[str] = []
        meters = Meters()

        def hear(event: Any) -> None:
            later.append(event)

        later: list[Any] = []
        engine = FrozenEngine(hear)
        tuner = Tuner(engine, meters, lambda text, _refusal: heard.append(text))
        engine.open(RunConfig())
        self.later = later
        self.deliver(meters, tuner)
        return tuner, engine, meters, heard

    def deliver(self, meters: Meters, tuner: Tuner) -> None:
        while self.later:
            event = self.later.pop(0)
            meters.take(event)
            tuner.take(event)

    def test_steps_add_up_before_the_engine_answers(self) -> None:
        tuner, _, meters, _ = self.tuner()
        for _ in range(3):
            tuner.turn(BY_KEY[DROP], 1)
        assert meters.config is not None and get(meters.config, DROP) == 0.0
        self.deliver(meters, tuner)
        assert get(meters.config, DROP) == 0.15

    def test_undo_and_redo(self) -> None:
        tuner, _, meters, heard = self.tuner()
        for direction in (1, 1):
            tuner.turn(BY_KEY[DROP], direction)
            self.deliver(meters, tuner)
        values = []
        for step in (tuner.undo, tuner.undo, tuner.undo, tuner.redo, tuner.redo, tuner.redo):
            step()
            self.deliver(meters, tuner)
            assert meters.config is not None
            values.append(get(meters.config, DROP))
        assert values == [0.05, 0.0, 0.0, 0.05, 0.1, 0.1]
        assert heard == ["Nothing to undo.", "Nothing to redo."]

    def test_a_refusal_changes_nothing_and_is_said(self) -> None:
        tuner, engine, meters, heard = self.tuner()
        tuner.turn(BY_KEY[DROP], 1)
        self.deliver(meters, tuner)
        engine.refuse = "the disk is on fire"
        tuner.undo()
        self.deliver(meters, tuner)
        assert heard == ["the disk is on fire"]
        engine.refuse = ""
        tuner.undo()
        self.deliver(meters, tuner)
        assert meters.config is not None and get(meters.config, DROP) == 0.0

    def test_without_an_engine_it_says_so(self) -> None:
        heard: list[str] = []
        tuner = Tuner(Refusing(), Meters(), lambda text, _refusal: heard.append(text))
        tuner.turn(BY_KEY[DROP], 1)
        tuner.set({DROP: 0.5})
        assert "Open a model first" in heard[0]
        assert "not running" in heard[1]

    def test_some_settings_wait_until_the_model_is_opened_again(self) -> None:
        tuner, engine, meters, _ = self.tuner()
        tuner.turn(BY_KEY["model.ctx"], 1)
        tuner.turn(BY_KEY["model.ctx"], 1)
        tuner.turn(BY_KEY[DROP], 1)
        self.deliver(meters, tuner)
        assert tuner.waiting == {"model.ctx": 16384}
        assert [name for name, _ in engine.calls] == ["open", "set_live"]
        again = tuner.config_to_reopen(RunConfig())
        assert (again.model.ctx, again.routing.drop_cold_experts) == (16384, 0.05)
        assert again.stream.cache_mb == "auto"
        tuner.turn(BY_KEY["model.ctx"], -1)
        tuner.turn(BY_KEY["model.ctx"], -1)
        assert tuner.waiting == {}

    def test_an_answer_to_somebody_else_is_left_alone(self) -> None:
        tuner, _, meters, heard = self.tuner()
        assert meters.config is not None
        tuner.take(LiveChanged(99, {DROP: 0.5}, {DROP: 0.0}, meters.config, 3))
        tuner.take(LiveRefused(98, {DROP: 0.5}, "no"))
        tuner.undo()
        assert heard == ["no", "Nothing to undo."]


class Scripted:
    """Takes what a trial asks, and lets the test answer."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []

    def _note(self, name: str, value: Any) -> int:
        self.asked.append((name, value))
        return len(self.asked)

    def set_live(self, changes: dict[str, Any]) -> int:
        return self._note("set_live", changes)

    def generate(self, prompt: Any, n_predict: int | None = None) -> int:
        return self._note("generate", prompt)

    def cancel(self) -> None:
        self._note("cancel", None)

    def clear(self) -> None:
        self._note("clear", None)


class TestTrial:
    BEFORE = RunConfig().replace({CACHE: 4000, DROP: 0.5})

    def trial(self) -> tuple[Trial, Scripted]:
        engine = Scripted()
        faster = self.BEFORE.replace({DROP: 0.75, "model.ctx": 8192})
        sides = (Side("in force", self.BEFORE), Side("faster", faster))
        trial = Trial(engine, self.BEFORE, sides, "hello")
        trial.start()
        return trial, engine

    def answer(self, trial: Trial, request: int, text: str, drop: float) -> None:
        assert trial.take(Text(request, text))
        assert trial.take(TokenRows(request, tuple(rows(40, drop=drop))))
        answer = Answer(text, "", [], 1, 0, 40, 5.0, None, "eos")
        assert trial.take(Finished(request, answer, 41))

    def test_runs_one_side_after_the_other_and_puts_the_settings_back(self) -> None:
        trial, engine = self.trial()
        assert engine.asked == [("clear", None), ("generate", "hello")]
        self.answer(trial, 2, "one", 0.0)
        assert engine.asked[2:] == [("clear", None), ("set_live", {DROP: 0.75})]
        assert trial.take(LiveChanged(4, {DROP: 0.75}, {DROP: 0.5}, self.BEFORE, 40))
        assert engine.asked[4:] == [("generate", "hello")]
        self.answer(trial, 5, "two", 0.75)
        assert engine.asked[5:] == [("set_live", {DROP: 0.5})]
        assert not trial.running
        assert trial.sides[1].left_out == ["ctx"]
        assert "tok/s, separated" in trial.verdict()
        assert "different answers" in trial.verdict()
        assert trial.sides[1].figures().startswith("40 tokens, ")
        assert "left out" in trial.sides[1].figures()

    def test_leaves_others_events_alone(self) -> None:
        trial, _ = self.trial()
        assert not trial.take(Text(77, "not mine"))
        assert trial.sides[0].text == ""
        assert "are needed" in trial.verdict()

    def test_a_refusal_ends_it_and_is_told(self) -> None:
        trial, engine = self.trial()
        self.answer(trial, 2, "one", 0.0)
        trial.take(LiveRefused(4, {DROP: 0.75}, "no cache"))
        assert (trial.running, trial.trouble) == (False, "no cache")
        assert engine.asked[-1] == ("set_live", {DROP: 0.5})

    def test_stopping_puts_the_settings_back(self) -> None:
        trial, engine = self.trial()
        trial.stop()
        assert engine.asked[-1] == ("cancel", None)
        assert not trial.running


class TestProfiles:
    @pytest.fixture(autouse=True)
    def _own_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(profiles, "user_profiles_dir", lambda: tmp_path)

    def test_saves_what_is_no_default_and_keeps_comments(self, tmp_path: Path) -> None:
        config = RunConfig().replace({DROP: 0.6, "model.path": "/x.gguf", "run.prompt": "hi"})
        path = profiles.save("mine", config)
        assert load_profile(path) == {DROP: 0.6}
        path.write_text("# why\n[routing]\ndrop-cold-experts = 0.6 # measured\n")
        profiles.save("mine", config.replace({DROP: 0.0, "sampling.temp": 0.7}))
        text = path.read_text()
        assert "# why" in text and "# measured" in text
        assert load_profile(path) == {DROP: 0.0, "sampling.temp": 0.7}

    @pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a\0b"])
    def test_a_name_that_is_none_is_refused(self, name: str) -> None:
        with pytest.raises(InputError):
            profiles.save(name, RunConfig())

    def test_differences_leave_out_what_is_of_a_conversation(self) -> None:
        left = RunConfig().replace({DROP: 0.5, "run.prompt": "a", "model.path": "/x"})
        right = RunConfig().replace({"stream.io-threads": 8, "description": "b"})
        found = {item.key: (item.left, item.right) for item in profiles.differences(left, right)}
        assert found == {DROP: (0.5, 0.0), "stream.io-threads": (4, 8)}
        assert profiles.to_apply(left, right) == {DROP: 0.0, "stream.io-threads": 8}
