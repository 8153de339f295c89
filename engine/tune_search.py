"""The search of `tuiwork tune`, apart from measuring: what to try next, and what to believe.

Pure. `Search.run` is a generator: it yields the cells to measure and is sent what they gave. A
challenger runs against the best settings so far in interleaved rounds, A B then B A, over the same
tokens. It is believed to be faster only if the interval of the ratio leaves out 1 both by tokens
and by rounds (`tune_rounds` says why). Whatever is not separated changes nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from engine.quality_stats import Estimate, MovingBlocks
from engine.stats import Comparison, Interval, block_for, compare
from engine.tune_rounds import ratio_interval

Verdict = Literal["faster", "slower", "not separated"]
Held = Literal["held", "broken", "not shown"]


@dataclass(frozen=True)
class Knob:
    """A setting and what to try of it."""

    key: str
    ladders: tuple[tuple[Any, ...], ...]
    """Values in the order in which they are tried; a ladder ends where it stops paying, and the
    next is only climbed if the one before gained nothing."""
    lossy: bool = False
    along: Mapping[str, Mapping[Any, Any]] = field(default_factory=dict)
    """Other settings that must change with this one: by key, which value to which."""

    def turned(self, settings: Mapping[str, Any], value: Any) -> dict[str, Any]:
        """The settings with this one at `value`, and with it what must change along."""
        others = {
            key: changes[settings[key]]
            for key, changes in self.along.items()
            if settings.get(key) in changes
        }
        return {**settings, **others, self.key: value}

    @property
    def most_trials(self) -> int:
        """How many values there are to try."""
        return sum(len(ladder) for ladder in self.ladders)


@dataclass(frozen=True)
class Rules:
    """How much is measured, and what is good enough."""

    max_kl: float | None = None
    """Upper bound of the mean KL divergence against the lossless run, in nats; None: lossless."""
    max_rounds: int = 5
    worth: float = 0.02
    """Where no round gained as much as this, a trial ends early, with nothing changed."""
    min_rounds: int = 2
    """Before that both orders are measured at least once."""

    @property
    def looks(self) -> tuple[int, ...]:
        """After how many rounds a challenger may be believed."""
        return tuple(sorted({min(3, self.max_rounds), self.max_rounds}))

    @property
    def confidence(self) -> float:
        """Of each look's intervals, so that all looks of a trial together err in 5 %."""
        return 1 - 0.05 / len(self.looks)


@dataclass(frozen=True)
class Cell:
    """One stretch of tokens under some settings."""

    settings: dict[str, Any]
    """Every setting that the search decides, by dotted key."""
    round: int
    """Which stretch of the text: all cells of a round decode the same tokens."""
    needs_kl: bool = False


@dataclass(frozen=True)
class Sample:
    """What a cell gave, token by token."""

    token_ms: Sequence[float]
    kl: Sequence[float] = ()
    """Against the lossless run, in nats; empty where it was not asked for."""


@dataclass(frozen=True)
class Trial:
    """A challenger against the best settings so far, and what came of it."""

    key: str
    before: Any
    after: Any
    comparison: Comparison
    """By tokens."""
    rounds: Interval
    """Of the ratio, by rounds."""
    verdict: Verdict
    round_ratios: tuple[float, ...]
    """Challenger's rate over the other's, by round."""
    kl: Estimate
    held: Held | None
    """Whether the quality bound holds; None: nothing lossy, so nothing to hold."""
    accepted: bool
    reason: str


@dataclass
class Sides:
    """What both sides of a trial gave so far."""

    before_ms: list[float] = field(default_factory=list)
    after_ms: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)

    def add(self, before: Sample, after: Sample) -> None:
        """One round's samples."""
        self.before_ms += before.token_ms
        self.after_ms += after.token_ms
        self.kl += after.kl
        rates = [len(s.token_ms) / sum(s.token_ms) for s in (before, after)]
        self.ratios.append(rates[1] / rates[0])


class Search:
    """Tries knobs one after the other from `start`; `settings` and `trials` are what it knows."""

    def __init__(self, start: Mapping[str, Any], knobs: Sequence[Knob], rules: Rules) -> None:
        self.start = dict(start)
        self.settings = dict(start)
        self.knobs = list(knobs)
        self.rules = rules
        self.trials: list[Trial] = []
        self.whole: Trial | None = None
        """The best settings against those that the search began with."""
        self.cells_done = 0
        self._trials_left = sum(knob.most_trials for knob in knobs) + 1
        self._rounds_begun = 0

    @property
    def most_cells_left(self) -> int:
        """Cells still to come if no trial ends early."""
        return 2 * (self._trials_left * self.rules.max_rounds - self._rounds_begun)

    def run(self) -> Generator[Cell, Sample, None]:
        """Yields cells; expects each one's sample to be sent."""
        for knob in self.knobs:
            yield from self._turn(knob)
        if self.settings != self.start:
            self.whole = yield from self._try("", self.start, self.settings)
        self._trials_left = 0

    def _turn(self, knob: Knob) -> Generator[Cell, Sample, None]:
        left = self._trials_left - knob.most_trials
        for ladder in knob.ladders:
            gained = False
            for value in ladder:
                after = knob.turned(self.settings, value)
                trial = yield from self._try(knob.key, self.settings, after)
                self.trials.append(trial)
                if trial.accepted:
                    self.settings = after
                    gained = True
                elif _ends_ladder(knob, trial):
                    break
            if gained:
                break
        self._trials_left = left

    def _try(
        self, key: str, before: Mapping[str, Any], after: Mapping[str, Any]
    ) -> Generator[Cell, Sample, Trial]:
        before, after = dict(before), dict(after)
        lossy = self.rules.max_kl is not None and is_lossy(after)
        sides = Sides()
        trial: Trial | None = None
        for number in range(self.rules.max_rounds):
            self._rounds_begun = number + 1
            samples: dict[bool, Sample] = {}
            # A B, then B A: what drifts during a round favours either side in turn.
            for is_after in (False, True) if number % 2 == 0 else (True, False):
                cell = Cell(after if is_after else before, number, needs_kl=is_after and lossy)
                samples[is_after] = yield cell
                self.cells_done += 1
            sides.add(samples[False], samples[True])
            trial = judge(key, before.get(key), after.get(key), sides, self.rules, lossy=lossy)
            if trial is not None:
                break
        assert trial is not None
        self._trials_left -= 1
        self._rounds_begun = 0
        return trial


def is_lossy(settings: Mapping[str, Any]) -> bool:
    """Whether settings of the search change answers."""
    return bool(settings.get("routing.drop-cold-experts"))


def judge(
    key: str, before: Any, after: Any, sides: Sides, rules: Rules, *, lossy: bool
) -> Trial | None:
    """What the rounds so far say; None: nothing yet, measure on. Never None after the last."""
    n = len(sides.ratios)
    last = n >= rules.max_rounds
    looks = n in rules.looks
    block = block_for(len(sides.after_ms))
    tokens = compare(sides.before_ms, sides.after_ms, block=block, confidence=rules.confidence)
    rounds = ratio_interval(sides.ratios, rules.confidence)
    speed = _speed(tokens, rounds) if looks else "not separated"
    kl, held = _quality(sides.kl, rules) if lossy else (Estimate(None), None)
    hopeless = n >= rules.min_rounds and max(sides.ratios) < 1 + rules.worth
    accepted = speed == "faster" and held in (None, "held")
    if not (accepted or hopeless or held == "broken" or speed == "slower" or last):
        return None
    reason = _reason(speed, held, hopeless, rules)
    return Trial(
        *(key, before, after, tokens, rounds, speed, tuple(sides.ratios)),
        *(kl, held, accepted, reason),
    )


def _speed(tokens: Comparison, rounds: Interval) -> Verdict:
    """Separated only where tokens and rounds both say so."""
    if min(tokens.interval.low, rounds.low) > 1:
        return "faster"
    return "slower" if max(tokens.interval.high, rounds.high) < 1 else "not separated"


def _quality(kl: Sequence[float], rules: Rules) -> tuple[Estimate, Held]:
    """The mean KL, and whether its whole interval is within the bound."""
    assert rules.max_kl is not None
    if not kl:
        return Estimate(None), "not shown"
    values = np.asarray(kl, np.float64)
    found = MovingBlocks(len(values)).mean(values)
    bounds = found.interval
    if bounds is None:
        return found, "not shown"
    if bounds.high <= rules.max_kl:
        return found, "held"
    return found, "broken" if bounds.low > rules.max_kl else "not shown"


def _reason(speed: Verdict, held: Held | None, hopeless: bool, rules: Rules) -> str:
    if held == "broken":
        return "breaks the quality bound"
    if speed == "slower":
        return "slower"
    if hopeless:
        return f"no round was {100 * rules.worth:g} % faster"
    if held == "not shown":
        return "not shown to hold the quality bound"
    return "faster" if speed == "faster" else "not separated"


def _ends_ladder(knob: Knob, trial: Trial) -> bool:
    """Whether the next value of the ladder is not worth a trial.

    More dropping saves more reads and costs more quality: a small fraction that gains too little
    to be seen says nothing against a larger one, but one that breaks the bound does.
    """
    if knob.lossy:
        return trial.held in ("broken", "not shown")
    return True
