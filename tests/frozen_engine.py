"""An engine that is not there: the client's face, with counters and events made by a script.

Frozen: the same seed gives the same numbers, so that pictures of the app do not change by
themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from engine.config import RunConfig, get
from engine.counters import (
    ABSENT,
    LATENCY_BUCKETS,
    MAX_LANES,
    READING,
    RESIDENT,
    Counts,
    StoreCounters,
)
from engine.messages import (
    Cleared,
    Event,
    Finished,
    LiveChanged,
    Opened,
    Text,
    TokenRows,
    Tokens,
    Tracing,
)
from engine.results import Answer, LayerShape, ModelInfo
from engine.telemetry import TokenRow
from tuiwork.usage import MachineUse, ProcessUse

GIB, MIB = 2**30, 2**20
ENTRY_BYTES = 2_654_208
ANSWER = """The lighthouse keeper counted **three lights** that night.

1. The lamp itself, turning.
2. A trawler, far out and going home.
3. Something slower, with no reason to be there.

```python
def beacon(seconds: float) -> bool:
    return seconds % 12 < 1.5
```

He wrote the third one down and did not sleep.
"""


def token_row(step: int, random: np.random.Generator, *, drop: float = 0.0) -> TokenRow:
    """A plausible token: what is dropped need not be read."""
    io = float(random.gamma(6, 18)) * (1 - 0.55 * drop)
    compute = 76 + float(random.normal(0, 3))
    mgmt, overhead = 6 + float(random.random()), 2 + float(random.random())
    if step % 37 == 11:
        io += 260
    values: dict[str, Any] = dict.fromkeys(TokenRow.__dataclass_fields__, 0)
    return TokenRow(
        **values
        | {
            "step": step,
            "steps": 256,
            "wall_ms": io + compute + mgmt,
            "io_ms": io,
            "stall_ms": io,
            "compute_ms": compute,
            "mgmt_ms": mgmt,
            "loop_overhead_ms": overhead,
            "read_bytes": int(io * 1.2e6),
            "experts_routed": 384,
            "experts_dropped": int(384 * 0.12 * drop),
            "mass_discarded": 0.9 * drop,
        }
    )


class FrozenEngine:
    """As `tuiwork.client.EngineClient` looks to the app. Answers settings at once."""

    def __init__(
        self,
        on_event: Callable[[Event], None],
        *,
        n_layer: int = 48,
        n_expert: int = 128,
        top_k: int = 8,
    ) -> None:
        self.say = on_event
        self.shape = (n_layer, n_expert)
        self.top_k = top_k
        self.random = np.random.default_rng(5)
        self.config: RunConfig | None = None
        self.opened: Opened | None = None
        self.live: dict[str, Counts] | None = None
        self.running = False
        self.n_rows = 0
        self.calls: list[tuple[str, Any]] = []
        self.refuse = ""
        self._requests = itertools.count(1)

    def open(self, config: RunConfig) -> None:
        """Open at once."""
        self.calls.append(("open", config))
        self.config, self.running, self.n_rows = config, True, 0
        self.live = self._counters()
        cache = config.stream.cache_mb
        resolved = config.replace(
            {
                "stream.cache-mb": cache if isinstance(cache, int) else 4000,
                "model.threads": 2,
                "stream.overlap": "off",
            }
        )
        n_layer, n_expert = self.shape
        demand = n_layer * self.top_k * ENTRY_BYTES
        info = ModelInfo(
            path="/models/Qwen3-30B-A3B-Q4_K_M.gguf",
            name="Qwen3-30B-A3B",
            arch="qwen3moe",
            n_layer=n_layer,
            n_expert=n_expert,
            n_expert_used=self.top_k,
            ctx=4096,
            n_vocab=151936,
            token_demand_bytes=demand,
            layer_demand_bytes=demand // n_layer,
            expert_bytes_total=n_layer * n_expert * ENTRY_BYTES,
            dense_bytes=int(0.96 * GIB),
            has_chat_template=True,
        )
        self.opened = Opened(
            info=info,
            resolved=resolved,
            notes=("O_DIRECT is not possible on tmpfs: reads go through the page cache.",),
            layers=tuple(LayerShape(i, n_expert, ENTRY_BYTES) for i in range(n_layer)),
            load_s=3.2,
            kv_bytes=384 * MIB,
            counters={},
        )
        self.say(self.opened)

    def generate(self, prompt: Any, n_predict: int | None = None) -> int:
        """Only notes that it was asked."""
        request = next(self._requests)
        self.calls.append(("generate", prompt))
        return request

    def cancel(self) -> None:
        """Only notes that it was asked."""
        self.calls.append(("cancel", None))

    def set_live(self, changes: dict[str, Any]) -> int:
        """In force at once, unless `refuse` says why not."""
        from engine.messages import LiveRefused

        request = next(self._requests)
        self.calls.append(("set_live", changes))
        assert self.opened is not None
        if self.refuse:
            self.say(LiveRefused(request, changes, self.refuse))
            return request
        before = {key: get(self.opened.resolved, key) for key in changes}
        self.opened = replace(self.opened, resolved=self.opened.resolved.replace(changes))
        self.say(LiveChanged(request, changes, before, self.opened.resolved, self.n_rows))
        return request

    def count_tokens(self, prompt: Any) -> int:
        """Always nineteen."""
        request = next(self._requests)
        self.say(Tokens(request, 19, 4096))
        return request

    def trace_routes(self, path: str | None) -> int:
        """Says that it traces."""
        self.say(Tracing(1, path))
        return 1

    def clear(self) -> None:
        """Cleared at once."""
        self.say(Cleared())

    def close(self) -> None:
        """Gone."""
        self.running = False

    def machine_sample(self) -> MachineUse:
        """A laptop under some load."""
        engine = ProcessUse(2, int(5.6 * GIB), int(5.5 * GIB), 120 * MIB, 0, 171.0, 12)
        app = ProcessUse(1, 90 * MIB, 60 * MIB, 30 * MIB, 0, 4.0, 0)
        return MachineUse(app, engine, int(15.5 * GIB), int(6.1 * GIB), 210 * MIB, 4 * GIB)

    # The script.

    def tokens(self, n: int, *, drop: float = 0.0) -> None:
        """Say that tokens were generated; `step` moves the counters."""
        rows = [token_row(self.n_rows + i + 1, self.random, drop=drop) for i in range(n)]
        self.n_rows += n
        self.say(TokenRows(1, tuple(rows)))

    def answer(self, text: str = ANSWER) -> None:
        """Say an answer's text and its end."""
        self.say(Text(1, text))
        answer = Answer(text, "", [], 19, 0, 90, 5.2, 31.0, "eos")
        self.say(Finished(1, answer, 1204))

    def step(self, *, drop: float = 0.0) -> None:
        """One token in the counters: each layer routes to a few experts, popular ones more."""
        live, (n_layer, n_expert) = self.live, self.shape
        assert live is not None
        totals = dict(zip(StoreCounters.NAMES, live["totals"].tolist(), strict=True))
        clock = totals["clock"] + 1
        rows = np.repeat(np.arange(n_layer), self.top_k)
        picked = np.minimum(self.random.exponential(n_expert / 5, len(rows)), n_expert - 1)
        experts = (picked.astype(int) * 37 + rows * 11) % n_expert
        live["state"][live["state"] == READING] = RESIDENT
        cold = live["state"][rows, experts] == ABSENT
        left_out = cold & (self.random.random(len(rows)) < 0.6 * drop)
        missed = cold & ~left_out
        np.add.at(live["hits"], (rows[~cold], experts[~cold]), 1)
        np.add.at(live["misses"], (rows[missed], experts[missed]), 1)
        live["state"][rows[missed], experts[missed]] = READING
        kept = ~left_out
        live["last_used"][rows[kept], experts[kept]] = clock
        live["last_discarded"][rows[left_out], experts[left_out]] = clock
        self._evict(clock)
        self._count_routing(rows, left_out)
        self._count_lanes(int(missed.sum()))
        totals |= {
            "clock": clock,
            "hits": int(live["hits"].sum()),
            "misses": int(live["misses"].sum()),
            "evictions": totals["evictions"] + 20,
            "resident_bytes": int((live["state"] != ABSENT).sum()) * ENTRY_BYTES,
            "budget_bytes": 4000 * MIB,
        }
        live["totals"][:] = [totals[name] for name in StoreCounters.NAMES]

    def _evict(self, clock: int) -> None:
        assert self.live is not None
        state, used = self.live["state"], self.live["last_used"]
        room = 4000 * MIB // ENTRY_BYTES - int((state == READING).sum())
        resident = np.flatnonzero(state.ravel() == RESIDENT)
        surplus = len(resident) - room
        if surplus > 0:
            oldest = resident[np.argsort(used.ravel()[resident], kind="stable")[:surplus]]
            state.ravel()[oldest] = ABSENT

    def _count_routing(self, rows: Counts, left_out: np.ndarray[Any, Any]) -> None:
        assert self.live is not None
        np.add.at(self.live["routed"], rows, 1)
        np.add.at(self.live["examined"], rows, 1)
        np.add.at(self.live["dropped"], rows[left_out], 1)
        np.add.at(self.live["mass_discarded_ppb"], rows[left_out], 31_000_000)
        self.live["routings"] += 1

    def _count_lanes(self, n_reads: int) -> None:
        assert self.live is not None
        for read in range(n_reads * 3):
            lane = read % 4
            took_us = float(self.random.gamma(4, 420))
            self.live["lane_bytes"][lane] += ENTRY_BYTES // 3
            self.live["lane_reads"][lane] += 1
            self.live["lane_busy_ns"][lane] += int(took_us * 1000)
            self.live["lane_latency_counts"][lane, int(took_us).bit_length()] += 1

    def _counters(self) -> dict[str, Counts]:
        n_layer, _ = self.shape
        per_expert = ("state", "hits", "misses", "last_used", "last_discarded")
        per_layer = (
            "routed",
            "examined",
            "dropped",
            "substituted",
            "mass_discarded_ppb",
            "routings",
        )
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(per_expert, self.shape)
        shapes |= dict.fromkeys(per_layer, (n_layer,))
        shapes |= dict.fromkeys(("lane_bytes", "lane_reads", "lane_busy_ns"), (MAX_LANES,))
        shapes["lane_latency_counts"] = (MAX_LANES, LATENCY_BUCKETS)
        shapes["totals"] = (len(StoreCounters.NAMES),)
        return {name: np.zeros(shape, np.int64) for name, shape in shapes.items()}
