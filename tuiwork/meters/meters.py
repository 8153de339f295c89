"""All that the app knows about the engine: what it last said, and what its counters show.

Everything that panels show is read from here. `tick` samples the counters, `take` is told every
event; neither touches a widget.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from engine.config import RunConfig
from engine.counters import Counts
from engine.messages import (
    Cleared,
    EngineDied,
    Event,
    Failed,
    Finished,
    LiveChanged,
    Opened,
    OpenFailed,
    OpenProgress,
    PromptProgress,
    Resized,
    TokenRows,
)
from engine.policy import ColdRule
from tuiwork.meters.counters import Counters, LaneMeter, LaneSample, Totals
from tuiwork.meters.heat import ExpertDetail
from tuiwork.meters.ring import Ring
from tuiwork.meters.tokens import TokenHistory
from tuiwork.text import MIB
from tuiwork.tuning.changes import ChangeLog
from tuiwork.usage import MachineUse

_MEMORY_HISTORY = 300


class Doing(Enum):
    """What the engine is at."""

    NOTHING = "no model"
    OPENING = "opening"
    READY = "ready"
    PROMPT = "reading the prompt"
    ANSWERING = "answering"
    DEAD = "the engine died"


@dataclass(frozen=True)
class RoutingTotals:
    """What became of routed experts, by layer (engine.counters.RoutingCounters)."""

    routed: Counts
    examined: Counts
    dropped: Counts
    substituted: Counts
    mass_discarded_ppb: Counts
    routings: Counts

    @classmethod
    def of(cls, counters: Counters) -> RoutingTotals:
        """Copies of the counters."""
        return cls(*(counters[name].copy() for name in cls.__dataclass_fields__))

    def since(self, before: RoutingTotals | None) -> RoutingTotals:
        """What was added since an earlier moment."""
        if before is None:
            return self
        names = self.__dataclass_fields__
        return RoutingTotals(*(getattr(self, name) - getattr(before, name) for name in names))

    @property
    def left_out(self) -> Counts:
        """Dropped and substituted together."""
        return self.dropped + self.substituted

    def mass_share(self) -> float:
        """Share of the router's weight that was discarded; NaN without routings."""
        routings = int(self.routings.sum())
        return float(self.mass_discarded_ppb.sum()) / 1e9 / routings if routings else float("nan")


class Meters:
    """The engine as the app sees it."""

    def __init__(self) -> None:
        self.doing = Doing.NOTHING
        self.stage = ""
        self.fraction = 0.0
        self.trouble = ""
        """Why there is no model, for people; empty if nothing went wrong."""
        self.opened: Opened | None = None
        self.config: RunConfig | None = None
        """As in force now."""
        self.profile = ""
        self.counters: Counters | None = None
        self.totals: Totals | None = None
        self.lanes = LaneMeter()
        self.tokens = TokenHistory()
        self.changes = ChangeLog()
        self.machine: MachineUse | None = None
        self.memory_left = Ring(_MEMORY_HISTORY)
        """Bytes the system had left, once a second."""
        self.faults_per_s = float("nan")
        """Of the engine: pages that had to come from disk."""
        self.disk_ceiling_bytes_per_s = float("nan")
        """As measured on demand; NaN: not measured."""
        self.context_used = 0
        self._routing_before: RoutingTotals | None = None
        self._faults_before: tuple[float, int] | None = None

    @property
    def streams(self) -> bool:
        """Whether experts are streamed, so that there are counters by layer."""
        return self.opened is not None and bool(self.opened.layers)

    def attach(self, counters: Counters | None) -> None:
        """Look at these counters from now on."""
        self.counters = counters
        self.totals = Totals.of(counters) if counters is not None else None

    def tick(self, now_s: float) -> None:
        """Sample the counters."""
        if self.counters is None:
            return
        self.totals = Totals.of(self.counters)
        if "lane_bytes" in self.counters:
            self.lanes.push(LaneSample.of(self.counters, now_s))

    def take_machine(self, use: MachineUse, now_s: float) -> None:
        """Take in what the machine and the engine's process use now."""
        self.machine = use
        left = use.memory_available
        self.memory_left.push(float("nan") if left is None else float(left))
        faults = use.engine.major_faults if use.engine is not None else None
        before, self.faults_per_s = self._faults_before, float("nan")
        if before is not None and faults is not None and before[0] < now_s and before[1] <= faults:
            self.faults_per_s = (faults - before[1]) / (now_s - before[0])
        self._faults_before = (now_s, faults) if faults is not None else None

    def take(self, event: Event) -> None:
        """Take in what the engine said."""
        if isinstance(event, TokenRows):
            self.doing = Doing.ANSWERING
            self.tokens.extend(event.rows)
            self.context_used += len(event.rows)
        elif isinstance(event, OpenProgress):
            self._progress(Doing.OPENING, event.stage, event.fraction)
        elif isinstance(event, PromptProgress):
            self._progress(Doing.PROMPT, event.stage, event.fraction)
        elif isinstance(event, Opened):
            self._take_opened(event)
        elif isinstance(event, (Finished, Failed)):
            self.doing = Doing.READY
            self.context_used = event.context_used
        elif isinstance(event, LiveChanged):
            self._take_change(event)
        elif isinstance(event, Resized):
            self.config = event.resolved
            if self.opened is not None:
                self.opened = replace(self.opened, notes=event.notes)
        elif isinstance(event, Cleared):
            self.context_used = 0
        elif isinstance(event, (OpenFailed, EngineDied)):
            self._take_end(event)

    def routing(self) -> RoutingTotals | None:
        """What became of routed experts since the latest change; None without counters."""
        if self.counters is None or "routed" not in self.counters:
            return None
        return RoutingTotals.of(self.counters).since(self._routing_before)

    def threshold(self) -> float:
        """The share below which a cold expert is weak now; NaN where nothing is left out."""
        if self.config is None or self.opened is None or self.config.routing.drop_cold_experts <= 0:
            return float("nan")
        rule = ColdRule(self.config.routing.drop_cold_experts)
        return rule.threshold(self.top_k())

    def top_k(self) -> int:
        """Experts per token in force."""
        assert self.opened is not None
        chosen = self.config.routing.n_expert_used if self.config is not None else 0
        return chosen or self.opened.info.n_expert_used

    def expert(self, row: int, expert: int) -> ExpertDetail | None:
        """What is known about one expert of a routed layer; None where there is none."""
        if self.counters is None or not self.streams or self.totals is None:
            return None
        assert self.opened is not None
        layer = self.opened.layers[row]
        if expert >= layer.n_expert:
            return None
        counters, clock = self.counters, self.totals.clock
        hits, misses = int(counters["hits"][row, expert]), int(counters["misses"][row, expert])
        used = int(counters["last_used"][row, expert])
        discarded = int(counters["last_discarded"][row, expert])
        of_layer = int(counters["hits"][row].sum() + counters["misses"][row].sum())
        return ExpertDetail(
            layer.number,
            expert,
            int(counters["state"][row, expert]),
            hits,
            misses,
            layer.entry_bytes,
            max(clock - used, 0) if used else None,
            (hits + misses) / of_layer if of_layer else float("nan"),
            discarded > 0 and discarded >= clock,
        )

    def dense_bytes(self) -> float:
        """The weights that every token needs whole; NaN without a model."""
        if self.opened is None:
            return float("nan")
        return float(self.opened.info.dense_bytes - self.opened.info.row_bytes)

    def budget_bytes(self) -> int:
        """What experts may take; 0 is no cache. Before the first token the counters do not say."""
        if self.totals is not None and self.totals.budget_bytes:
            return self.totals.budget_bytes
        cache = self.config.stream.cache_mb if self.config is not None else 0
        return cache * MIB if isinstance(cache, int) else 0

    def kv_bytes(self) -> float:
        """Keys and values of the context; NaN where unknown."""
        known = self.opened.kv_bytes if self.opened is not None else None
        return float(known) if known is not None else float("nan")

    def _progress(self, doing: Doing, stage: str, fraction: float) -> None:
        self.doing, self.stage, self.fraction = doing, stage, fraction

    def _take_opened(self, event: Opened) -> None:
        self.doing, self.trouble = Doing.READY, ""
        self.opened, self.config = event, event.resolved
        self.context_used = 0
        self.lanes.forget()
        self.tokens.forget()
        self.changes.forget()
        self._routing_before = None

    def _take_change(self, event: LiveChanged) -> None:
        self.config = event.resolved
        if self.counters is not None and "routed" in self.counters:
            self._routing_before = RoutingTotals.of(self.counters)
        self.changes.add(event.before, event.changes, event.after_rows)

    def _take_end(self, event: OpenFailed | EngineDied) -> None:
        died = isinstance(event, EngineDied)
        self.doing = Doing.DEAD if died else Doing.NOTHING
        self.trouble = event.message
        self.context_used = 0
        if not died:
            self.opened = None
            self.attach(None)


def lanes_in_flight(meters: Meters) -> float:
    """Reads under way at once, on average over the last second; NaN before any."""
    rates = meters.lanes.rates
    return float(np.sum(rates.in_flight)) if rates is not None else float("nan")
