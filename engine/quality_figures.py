"""What was measured of a setting, token by token, and the figures made from it. Pure.

Figures are over the scored tokens only; a prompt that warmed the cache is in none of them. Each is
an `Estimate` with an interval, unmeasured where it cannot be known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.quality_sets import N_USED, Variant
from engine.quality_stats import Estimate, MovingBlocks

Floats = npt.NDArray[np.float64]

SERIES = (
    *("nll", "kl", "same_top", "read_bytes", "reads", "hits", "misses"),
    *("evictions", "routed", "dropped", "substituted", "mass_discarded"),
)
"""What is kept of each scored token. `reads` are of slices, `mass_discarded` in routings."""


@dataclass(frozen=True)
class CacheState:
    """What the cache was before the first scored token, and what it became. Sizes in bytes."""

    budget_bytes: int
    warm_up_tokens: int
    """Prompt tokens read before scoring, in every window; 0: the cache was empty."""
    entry_bytes: int
    """Experts in memory when the first token was scored."""
    exit_bytes: int

    @property
    def entry(self) -> str:
        """`cold` (empty) or `warm`."""
        return "warm" if self.entry_bytes else "cold"


@dataclass(frozen=True)
class SettingRun:
    """One setting's run over the text."""

    variant: Variant
    series: dict[str, Floats]
    """By the names of SERIES, each of shape (n_scored,)."""
    cache: CacheState
    seconds: float
    top_k: int
    """Experts per token that were in force."""

    @property
    def n_tokens(self) -> int:
        """Scored tokens."""
        return len(self.series["nll"])

    def total(self, name: str) -> float:
        """The sum over the scored tokens of one of SERIES."""
        return float(self.series[name].sum())


@dataclass(frozen=True)
class Figures:
    """A setting in figures. Fractions are 0 to 1; nats; unmeasured is None."""

    ppl: Estimate
    """exp of the mean negative log-likelihood."""
    ppl_ratio: Estimate
    """Its perplexity over that of the lossless run, resampled in step."""
    kl_mean: Estimate
    kl_p99: Estimate
    kl_max: float
    top1: Estimate
    """Share of positions where both find the same token likeliest."""
    reads_saved: Estimate
    """Share of the lossless run's read bytes that were not read; negative: more were."""
    hit_rate: Estimate
    drop_rate: Estimate
    """Share of the routed experts that were left out."""
    substitute_rate: Estimate
    mass_lost: Estimate
    """Router's share of what was dropped or replaced, per routing; with fewer experts unmeasured,
    because nobody counts what the router would have given those behind the last one used."""


def summarise(run: SettingRun, lossless: SettingRun, blocks: MovingBlocks | None = None) -> Figures:
    """The figures of a run beside the lossless one over the same tokens."""
    blocks = blocks or MovingBlocks(run.n_tokens)
    ours, theirs = run.series, lossless.series
    return Figures(
        ppl=_exp(blocks.mean(ours["nll"])),
        ppl_ratio=_exp(blocks.mean(ours["nll"] - theirs["nll"])),
        kl_mean=blocks.mean(ours["kl"]),
        kl_p99=blocks.p99(ours["kl"]),
        kl_max=float(ours["kl"].max()),
        top1=blocks.mean(ours["same_top"]),
        reads_saved=reads_saved(run, lossless, blocks),
        hit_rate=blocks.ratio(ours["hits"], ours["hits"] + ours["misses"]),
        drop_rate=blocks.ratio(ours["dropped"], ours["routed"]),
        substitute_rate=blocks.ratio(ours["substituted"], ours["routed"]),
        mass_lost=Estimate(None)
        if N_USED in run.variant.settings
        else blocks.ratio(ours["mass_discarded"], ours["routed"] / run.top_k),
    )


def reads_saved(run: SettingRun, lossless: SettingRun, blocks: MovingBlocks) -> Estimate:
    """1 - bytes read / bytes that the lossless run read over the same tokens."""
    read = blocks.ratio(run.series["read_bytes"], lossless.series["read_bytes"])
    if read.value is None:
        return Estimate(None)
    low, high = read.low, read.high
    return Estimate(
        1 - read.value, None if high is None else 1 - high, None if low is None else 1 - low
    )


def _exp(mean: Estimate) -> Estimate:
    def exp(value: float | None) -> float | None:
        # A perplexity beyond 1e300 is no number that anybody needs.
        return None if value is None else math.exp(value) if value < 690 else math.inf

    return Estimate(exp(mean.value), exp(mean.low), exp(mean.high))


@dataclass
class TokenLog:
    """Collects the SERIES of a run while it goes."""

    rows: list[tuple[float, ...]] = field(default_factory=list)

    def add(self, row: Sequence[float]) -> None:
        """One scored token, in the order of SERIES."""
        self.rows.append(tuple(row))

    def series(self) -> dict[str, Floats]:
        """The columns as arrays of shape (n_scored,)."""
        table = np.array(self.rows, np.float64).reshape(-1, len(SERIES))
        return {name: table[:, column].copy() for column, name in enumerate(SERIES)}
