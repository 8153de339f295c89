"""What one run's token metrics say: its rate, where a token's time went, what was read.

Pure. A figure that any counted token lacks is None: a sum over some of the tokens would be wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from engine.errors import InputError
from engine.metrics_reader import TIME, FloatArray, TokenMetrics
from engine.stats import Rate, Resampled, block_for
from engine.telemetry import MIB

OVERHEAD = "loop_overhead_ms"


@dataclass(frozen=True)
class TokenTime:
    """Where a token's time went: milliseconds per token. The parts add up to the whole."""

    compute_ms: float | None
    """The rest of the decode; page faults and throttled cores are in it."""
    wait_ms: float | None
    """Compute stood still for reads."""
    mgmt_ms: float | None
    """Admission, eviction and bookkeeping of the cache."""
    loop_ms: float | None
    """Between two decodes: sampling, text, records."""


class Run:
    """A run without its first `skip` tokens. Raises InputError if none is left."""

    def __init__(self, metrics: TokenMetrics, skip: int = 0) -> None:
        if skip >= len(metrics):
            raise InputError(
                f"{metrics.path}: has {len(metrics)} tokens, of which --skip {skip} leaves none"
            )
        self.metrics = metrics
        self.skip = skip
        self._resampled: dict[tuple[bool, bool], Resampled] = {}

    def __len__(self) -> int:
        return len(self.metrics) - self.skip

    @property
    def path(self) -> Path:
        """The run's file."""
        return self.metrics.path

    @property
    def block(self) -> int:
        """Neighbouring tokens that the moving-block bootstrap draws together."""
        return block_for(len(self))

    @cached_property
    def decode_ms(self) -> FloatArray:
        """Each token's time in the decode call alone."""
        return self.metrics.columns[TIME][self.skip :]

    @property
    def has_loop_times(self) -> bool:
        """Whether the time between decodes was measured."""
        return self.metrics.measured(OVERHEAD, self.skip) is not None

    @cached_property
    def token_ms(self) -> FloatArray:
        """Each token's time: decode, and what lies between two of them where that is known."""
        between = self.metrics.measured(OVERHEAD, self.skip)
        return self.decode_ms if between is None else self.decode_ms + between

    @property
    def rate(self) -> Rate:
        """Tokens per second, with the interval of tokens drawn one by one."""
        return self.resampled().rate

    @property
    def blocked_rate(self) -> Rate:
        """The same with the interval of tokens drawn in moving blocks: neighbours are alike."""
        return self.resampled(blocks=True).rate

    def resampled(self, *, blocks: bool = False, decode_only: bool = False) -> Resampled:
        """The run's bootstrap: of single tokens or of blocks, of whole token times or decodes."""
        kind = (blocks, decode_only)
        if kind not in self._resampled:
            times = self.decode_ms if decode_only else self.token_ms
            self._resampled[kind] = Resampled(times, block=self.block if blocks else 1)
        return self._resampled[kind]

    @property
    def decode_tok_s(self) -> float:
        """Tokens per second of the decode calls alone."""
        return float(1000 * len(self) / self.decode_ms.sum())

    @cached_property
    def token_time(self) -> TokenTime:
        """Where a token's time went."""
        compute, mgmt = self._per_token("compute_ms"), self._per_token("mgmt_ms")
        wait = self._per_token("stall_ms")
        if wait is None and compute is not None and mgmt is not None:
            # Compute is what is left of the decode without waits and bookkeeping, overlap or not.
            wait = max(0.0, float(self.decode_ms.mean()) - compute - mgmt)
        return TokenTime(compute, wait, mgmt, self._per_token(OVERHEAD))

    @property
    def read_mib(self) -> float | None:
        """MiB of experts read per token."""
        return self._per_token("read_bytes", MIB)

    @property
    def reads(self) -> float | None:
        """Reads per token."""
        return self._per_token("reads")

    @property
    def major_faults(self) -> float | None:
        """Major page faults per token."""
        return self._per_token("majflt")

    @property
    def decode_hit_pct(self) -> float | None:
        """Hits in percent of the counted tokens' look-ups."""
        hits, misses = self._total("hits"), self._total("misses")
        if hits is None or misses is None or hits + misses == 0 or not self._has_cache:
            return None
        return 100 * hits / (hits + misses)

    @property
    def cumulative_hit_pct(self) -> float | None:
        """Hits in percent from the run's start on, the prompt's look-ups and skipped tokens too."""
        values = self.metrics.columns.get("cache_hit_pct")
        return None if values is None or np.isnan(values[-1]) else float(values[-1])

    @property
    def drop_pct(self) -> float | None:
        """Dropped experts in percent of the routed ones."""
        return self._share_of_routed("experts_dropped")

    @property
    def substitute_pct(self) -> float | None:
        """Replaced experts in percent of the routed ones."""
        return self._share_of_routed("experts_substituted")

    @property
    def mass_lost_pct(self) -> float | None:
        """The router's weight of what was dropped or replaced, in percent of all."""
        lost, routed = self._total("mass_discarded"), self._total("experts_routed")
        top_k = self.number("n_expert_used")
        if lost is None or not routed or not top_k:
            return None
        return 100 * lost / (routed / top_k)  # each routing has mass 1

    def number(self, *keys: str) -> float | None:
        """A number from the preamble under the first of `keys` that it has."""
        try:
            return float(self.metrics.preamble_value(*keys) or "")
        except ValueError:
            return None

    @property
    def _has_cache(self) -> bool:
        return self.number("cache_mb") != 0

    def _share_of_routed(self, name: str) -> float | None:
        routed, part = self._total("experts_routed"), self._total(name)
        if routed is None and part is None:
            routed, part = self._summed("experts_routed"), self._summed(name)
        if part == 0 and self.number("drop_cold_experts", "drop_cold_frac") == 0:
            return 0.0  # an engine that drops nothing need not count
        return 100 * part / routed if routed and part is not None else None

    def _summed(self, name: str) -> float | None:
        """A figure of the summary, which is about the whole run."""
        try:
            value = float(self.metrics.summary.get(name, ""))
        except ValueError:
            return None
        return value if value >= 0 else None

    def _total(self, name: str) -> float | None:
        values = self.metrics.measured(name, self.skip)
        return None if values is None else float(values.sum())

    def _per_token(self, name: str, unit: float = 1.0) -> float | None:
        total = self._total(name)
        return None if total is None else total / unit / len(self)
