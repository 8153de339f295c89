"""Settings: their defaults are usable, and what cannot be used is refused with a reason."""

from __future__ import annotations

import dataclasses
import datetime
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import SETTINGS, RunConfig, allowed, check_value, get, shown, validate


def problems_of(**changes: Any) -> list[str]:
    """The messages of `validate` after changes such as `stream__cache_mb=3`."""
    config = RunConfig()
    for name, value in changes.items():
        table, _, field = name.partition("__")
        part = dataclasses.replace(getattr(config, table), **{field: value})
        config = dataclasses.replace(config, **{table: part})
    return [f"{problem.key}: {problem.message}" for problem in validate(config)]


def test_defaults_are_valid_and_lossless() -> None:
    assert validate(RunConfig()) == []
    for key, spec in SETTINGS.items():
        assert not spec.lossy_at(get(RunConfig(), key)), key


def test_every_setting_says_what_it_means_and_where_it_ends() -> None:
    for key, spec in SETTINGS.items():
        assert spec.doc, key
        assert (spec.low is None) == (spec.high is None), key
        assert check_value(spec, spec.default) is None, key


@pytest.mark.parametrize("threads", [0, -1, 513, 10_000, True, "all", 1.5])
def test_threads_must_be_auto_or_a_sane_number(threads: Any) -> None:
    (problem,) = problems_of(model__threads=threads)
    assert "model.threads" in problem
    assert "1 to 512" in problem
    assert "auto" in problem


@pytest.mark.parametrize("lanes", [0, 65])
def test_lanes_have_bounds(lanes: int) -> None:
    (problem,) = problems_of(stream__io_threads=lanes)
    assert "1 to 64" in problem


@pytest.mark.parametrize("cache", [1, 800, 1499])
def test_a_cache_in_the_refused_band_needs_force(cache: int) -> None:
    (problem,) = problems_of(stream__cache_mb=cache)
    assert str(cache) in problem
    assert "1500" in problem
    assert "force-cache" in problem
    assert problems_of(stream__cache_mb=cache, stream__force_cache=True) == []


@pytest.mark.parametrize("cache", [0, 1500, 4000, "auto"])
def test_a_cache_outside_the_refused_band_is_good(cache: Any) -> None:
    assert problems_of(stream__cache_mb=cache) == []


@pytest.mark.parametrize("fraction", [1.01, -0.1, math.nan, math.inf])
def test_dropping_is_a_fraction(fraction: float) -> None:
    (problem,) = problems_of(routing__drop_cold_experts=fraction)
    assert "0 to 1" in problem


def test_dropping_needs_the_cache() -> None:
    (problem,) = problems_of(routing__drop_cold_experts=0.5, stream__cache_mb=0)
    assert "needs the cache" in problem


def test_every_wrong_value_is_reported_at_once() -> None:
    assert len(problems_of(model__threads=0, sampling__temp=99.0, stream__io_threads=0)) == 3


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("stream.cache-mb", "4GB", "'4GB' is not allowed"),
        ("stream.cache-mb", 4000.0, "a number, not a whole number"),
        ("stream.o-direct", 1, "not true or false"),
        ("stream.dense-weights", "ram", "anon, warm, mmap"),
        ("run.stop", "END", "a text, not a list of texts"),
        ("run.stop", ["a", 1], "not a list of texts"),
        ("run.prompt", 5, "a number, not a text"),
        ("run.prompt", datetime.date(2026, 1, 1), "a date, not a text"),
        ("model.path", "a\0b", "NUL"),
        ("sampling.temp", 10**400, "out of range"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(key: str, value: Any, said: str) -> None:
    message = check_value(SETTINGS[key], value)
    assert message is not None
    assert said in message


def test_a_whole_number_suits_a_fraction() -> None:
    assert check_value(SETTINGS["sampling.temp"], 1) is None


def test_messages_stay_short_whatever_is_given() -> None:
    assert len(shown("x" * 10_000)) <= 80
    assert "digits" in shown(16**9000)


def test_replace_changes_only_what_it_names() -> None:
    changed = RunConfig().replace({"stream.cache-mb": 4000, "description": "mine"})
    assert (changed.stream.cache_mb, changed.description) == (4000, "mine")
    assert changed.replace({"stream.cache-mb": "auto", "description": ""}) == RunConfig()


@given(
    # The refused band of the cache is a rule of its own, above.
    st.sampled_from(sorted(set(SETTINGS) - {"stream.cache-mb"})),
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.text())),
)
def test_any_value_is_accepted_or_refused_with_words(key: str, value: Any) -> None:
    message = check_value(SETTINGS[key], value)
    if message is None:
        problems = validate(RunConfig().replace({key: value}))
        assert key not in {problem.key for problem in problems}
    else:
        assert allowed(SETTINGS[key]) in message or "NUL" in message
