"""The knobs: which settings can be turned, in which steps, and what the next step is.

Pure: a knob looks at the configuration in force and says what it would be set to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.config import SETTINGS, SMALLEST_CACHE_MIB, RunConfig, get, is_live

StepFrom = Callable[[Any, int, RunConfig, int], Any]
"""(value now, -1 or 1, configuration, the model's own top-k) to the next value."""


def split_live(changes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the engine can change between tokens, and what needs the model opened again."""
    live = {key: value for key, value in changes.items() if is_live(key)}
    return live, {key: value for key, value in changes.items() if key not in live}


@dataclass(frozen=True)
class Knob:
    """One setting that a person turns."""

    key: str
    label: str
    step: StepFrom
    reopens: bool = False
    """Whether the model has to be opened again for it."""

    @property
    def lossy(self) -> bool:
        """Whether it can change what the model answers."""
        return SETTINGS[self.key].lossy

    def turned(self, config: RunConfig, direction: int, own_top_k: int) -> Any:
        """The value one step down (-1) or up (1); the same value at an end."""
        return self.step(get(config, self.key), direction, config, own_top_k)


def _clamped(key: str, value: Any) -> Any:
    spec = SETTINGS[key]
    low = value if spec.low is None else max(value, type(value)(spec.low))
    return low if spec.high is None else min(low, type(value)(spec.high))


def by(key: str, amount: float) -> StepFrom:
    """Steps of a fixed size; fractions stay on the grid of their steps."""

    def step(value: Any, direction: int, _config: RunConfig, _own: int) -> Any:
        if isinstance(amount, int):
            return _clamped(key, int(value) + direction * amount)
        return _clamped(key, round((round(value / amount) + direction) * amount, 6))

    return step


def doubling(key: str, smallest: int) -> StepFrom:
    """Twice or half; 0 lies below the smallest."""

    def step(value: Any, direction: int, _config: RunConfig, _own: int) -> Any:
        value = value if isinstance(value, int) else smallest
        if direction > 0:
            return _clamped(key, max(smallest, value * 2))
        return value // 2 if value // 2 >= smallest else value

    return step


def choosing(*choices: Any) -> StepFrom:
    """One of a few values, in a circle."""

    def step(value: Any, direction: int, _config: RunConfig, _own: int) -> Any:
        at = choices.index(value) if value in choices else 0
        return choices[(at + direction) % len(choices)]

    return step


def cache_step(value: Any, direction: int, config: RunConfig, _own: int) -> Any:
    """Steps of about an eighth, in whole 256 MiB where the cache is that large."""
    now = value if isinstance(value, int) else SMALLEST_CACHE_MIB
    if now < 2048:
        amount = max(1, now // 8) if config.stream.force_cache else 128
    else:
        amount = max(256, now // 8 // 256 * 256)
    least = 1 if config.stream.force_cache else SMALLEST_CACHE_MIB
    return max(least, min(now + direction * amount, 2**24))


def top_k_step(value: Any, direction: int, _config: RunConfig, own: int) -> Any:
    """From one expert to the model's own number, which is written 0."""
    now = (value or own) + direction
    return 0 if now >= own else max(1, now)


KNOBS: tuple[Knob, ...] = (
    Knob("stream.cache-mb", "expert cache", cache_step),
    Knob("stream.io-threads", "I/O lanes", by("stream.io-threads", 1)),
    Knob(
        "routing.drop-cold-experts",
        "drop cold below",
        by("routing.drop-cold-experts", 0.05),
    ),
    Knob("routing.cold-policy", "cold, weak experts", choosing("drop", "substitute")),
    Knob("routing.drop-renorm", "keep the total weight", choosing(False, True)),
    Knob("routing.n-expert-used", "experts per token", top_k_step),
    Knob("stream.overlap", "read while computing", choosing("auto", "on", "off")),
    Knob("stream.prefetch", "read the next layer", choosing("auto", "on", "off")),
    Knob("sampling.temp", "temperature", by("sampling.temp", 0.1)),
    Knob("sampling.top-k", "top-k", by("sampling.top-k", 5)),
    Knob("sampling.top-p", "top-p", by("sampling.top-p", 0.05)),
    Knob("sampling.min-p", "min-p", by("sampling.min-p", 0.01)),
    Knob("sampling.seed", "seed", by("sampling.seed", 1)),
    Knob("run.n-predict", "longest answer", doubling("run.n-predict", 16)),
    Knob("model.ctx", "context", doubling("model.ctx", 512), reopens=True),
    Knob("model.threads", "compute threads", by("model.threads", 1), reopens=True),
    Knob(
        "stream.dense-weights",
        "dense weights",
        choosing("anon", "warm", "mmap"),
        reopens=True,
    ),
    Knob("stream.o-direct", "past the page cache", choosing(False, True), reopens=True),
)
BY_KEY = {knob.key: knob for knob in KNOBS}
