"""What settings' figures say together, on runs made up by value."""

from __future__ import annotations

import numpy as np
import pytest

from engine.quality_curves import Verdicts, verdicts
from engine.quality_figures import SERIES, CacheState, SettingRun, summarise
from engine.quality_sets import REFERENCE, Variant, variant

N = 400


def run(of: Variant, kl: float, read: float, *, noise: float = 0.05, seed: int = 0) -> SettingRun:
    """A run of N tokens with this mean KL that reads this share of the lossless 100 bytes."""
    random = np.random.default_rng(seed)
    series = {name: np.zeros(N) for name in SERIES}
    wobble = 1 + noise * random.standard_normal(N)
    series["kl"] = np.abs(kl * wobble / wobble.mean())
    series["nll"] = np.full(N, 2.0 + kl)
    series["read_bytes"] = np.full(N, 100.0 * read)
    series["routed"] = np.full(N, 32.0)
    series["same_top"] = np.ones(N)
    return SettingRun(of, series, CacheState(2**20, 64, 2**20, 2**20), 1.0, 4)


def drop(fraction: float, **more: object) -> Variant:
    return variant({"routing.drop-cold-experts": fraction, **more})


def top(n: int) -> Variant:
    return variant({"routing.n-expert-used": n})


LOSSLESS = run(REFERENCE, 0.0, 1.0)


def judged(*runs: SettingRun) -> Verdicts:
    return verdicts([LOSSLESS, *runs], LOSSLESS)


def test_nothing_measured_says_nothing() -> None:
    assert verdicts([], LOSSLESS) == Verdicts([], [], [], [])
    assert judged() == Verdicts([], [], [], [])


def test_a_curve_goes_by_reads_saved_and_tells_its_slope() -> None:
    (curve,) = judged(run(drop(1.0), 0.5, 0.4), run(drop(0.5), 0.1, 0.8)).curves
    assert [(p.strength, round(p.reads_saved, 9)) for p in curve.points] == [(0.5, 0.2), (1.0, 0.6)]
    assert [p.step_kl_per_pct for p in curve.points] == pytest.approx([0.1 / 20, 0.4 / 40])


def test_families_are_compared_at_equal_reads_cheapest_first() -> None:
    found = judged(
        run(drop(0.5), 0.10, 0.5, seed=1),
        run(drop(1.0), 0.60, 0.1, seed=2),
        run(top(2), 0.40, 0.5, seed=3),
    ).levels
    at_half = next(level for level in found if level.reads_saved == 0.5)
    assert [one.family for one in at_half.families] == ["drop", "fewer experts"]
    assert [one.kl.value for one in at_half.families] == pytest.approx([0.10, 0.40], rel=1e-6)
    assert at_half.separated
    # Between settings a straight line; beyond a family's last one it is not there.
    at_most = next(level for level in found if level.reads_saved == 0.7)
    assert [one.family for one in at_most.families] == ["drop"]
    assert at_most.families[0].kl.value == pytest.approx(0.35)
    assert at_most.separated is None
    at_first = next(level for level in found if level.reads_saved == 0.1)
    assert at_first.families[0].kl.value == pytest.approx(0.02)


def test_a_difference_within_the_noise_is_not_separated() -> None:
    found = judged(
        run(drop(0.5), 0.100, 0.5, noise=0.9, seed=1), run(top(2), 0.102, 0.5, noise=0.9, seed=2)
    ).levels
    assert not next(level for level in found if level.reads_saved == 0.5).separated


def test_renormalising_is_judged_at_equal_fractions() -> None:
    raw = {"routing.drop-renorm": False}
    found = judged(
        run(drop(0.5), 0.1, 0.8, seed=1),
        run(drop(0.5, **raw), 0.2, 0.8, seed=2),
        run(drop(1.0), 0.3, 0.5, noise=2, seed=3),
        run(drop(1.0, **raw), 0.3, 0.5, noise=2, seed=4),
        run(drop(0.25), 0.01, 0.95),
    ).renormalising
    assert [pair.fraction for pair in found] == [0.5, 1.0]
    assert found[0].difference.value == pytest.approx(0.1, rel=1e-6)
    assert found[0].separated
    assert not found[1].separated


def test_a_curve_turns_where_it_is_furthest_below_its_chord() -> None:
    points = [(0.25, 0.01, 0.9), (0.5, 0.05, 0.7), (0.75, 0.1, 0.4), (1.0, 0.9, 0.2)]
    (turn,) = judged(*(run(drop(f), kl, read) for f, kl, read in points)).turns
    assert (turn.name, turn.strength) == ("drop 0.75", 0.75)
    assert turn.agreement == 1.0


def test_resamples_that_save_nothing_have_no_turn() -> None:
    """What settings save in a few tokens only, many resamples miss."""
    points = [(0.25, 0.02, 0.8), (0.75, 0.05, 0.4), (1.0, 0.5, 0.3)]
    runs = [run(drop(f), kl, read) for f, kl, read in points]
    for one in runs:
        one.series["read_bytes"][4:] = 100.0
    with np.errstate(all="raise"):
        (turn,) = judged(*runs).turns
    assert turn.name == "drop 0.75" and 0 < turn.agreement < 1


@pytest.mark.parametrize(
    "points",
    [
        [(0.5, 0.1, 0.5), (1.0, 0.5, 0.2)],
        [(0.25, 0.5, 0.9), (0.5, 0.8, 0.6), (1.0, 0.9, 0.2)],
        [(0.25, 0.0, 1.0), (0.5, 0.0, 1.0), (1.0, 0.0, 1.0)],
    ],
    ids=["too few", "dear first", "saves nothing"],
)
def test_a_curve_that_does_not_turn_says_so(points: list[tuple[float, float, float]]) -> None:
    assert judged(*(run(drop(f), kl, read) for f, kl, read in points)).turns == []


def test_without_reads_there_are_no_curves() -> None:
    silent = run(REFERENCE, 0.0, 0.0)
    found = verdicts([run(drop(0.5), 0.1, 0.0)], silent)
    assert found.curves == [] and found.levels == []
    assert summarise(run(drop(0.5), 0.1, 0.0), silent).reads_saved.value is None


def test_figures_of_a_run_made_by_hand() -> None:
    found = summarise(run(drop(0.5), 0.25, 0.4), LOSSLESS)
    assert found.ppl.value == pytest.approx(np.exp(2.25))
    assert found.ppl_ratio.value == pytest.approx(np.exp(0.25))
    assert found.kl_mean.value == pytest.approx(0.25)
    assert found.reads_saved.value == pytest.approx(0.6)
    assert found.top1.value == 1.0
    assert found.drop_rate.value == 0.0
    assert found.hit_rate.value is None  # nothing was looked up
    # What the router would have given the experts behind the last one is not counted.
    assert summarise(run(top(2), 0.25, 0.4), LOSSLESS).mass_lost.value is None
