"""Turns what happens in a session into token rows and traces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from time import perf_counter_ns

import numpy as np

from engine import policy
from engine.config import SETTINGS, RunConfig, get
from engine.counters import StepCounters
from engine.diagnostics import Diagnostics, ForcedRoutes
from engine.errors import InputError
from engine.experts import ExpertTag
from engine.lane_jobs import ReadOutcome
from engine.machine import cpu_name
from engine.observed import Routing
from engine.open_model import OpenModel
from engine.results import ModelInfo
from engine.telemetry import (
    MIB,
    NOT_COUNTED,
    UNMEASURED,
    Metrics,
    ProcessUse,
    TokenRow,
    TurnFigures,
)
from engine.traces import (
    DECODE,
    PREFETCHED,
    PREFILL,
    IoTraceWriter,
    RouteTraceWriter,
    TraceModel,
    read_route_trace,
)


class Recorder:
    """Counts per token; feeds traces and forced routes through the router's hooks."""

    def __init__(
        self, opened: OpenModel, info: ModelInfo, resolved: RunConfig, options: Diagnostics
    ) -> None:
        self._opened = opened
        self.metrics = Metrics(
            preamble(info, resolved, options, opened),
            load_s=opened.load_s,
            token_demand_bytes=info.token_demand_bytes,
            layer_demand_bytes=info.layer_demand_bytes,
        )
        self._turn = -1
        self._prefill = False
        self._position = 0
        self._n_tokens = 0
        self._answer_start = 0
        self._step = 0
        self._store_before = (0, 0, 0)
        self._wall_ns = 0
        self._left_decode_ns = 0
        self._before = ProcessUse.now()
        self._routes = self._forced(options)
        self._route_trace: RouteTraceWriter | None = None
        self._io_trace: IoTraceWriter | None = None
        self._model = trace_model(info, opened)
        if options.io_trace is not None and opened.streams:
            self._trace_reads(options.io_trace)
        if options.route_trace is not None:
            self.trace_routes(options.route_trace)

    def begin_turn(self, n_prompt: int) -> None:
        """A generation starts."""
        self._turn += 1
        counted = 0 if self._opened.streams else NOT_COUNTED
        self.metrics.turns.append(
            TurnFigures(n_prompt=n_prompt, prefill_read_bytes=counted, prefill_reads=counted)
        )
        self._left_decode_ns = 0
        self._step = 0

    def begin_decode(self, position: int, n_tokens: int, *, prefill: bool) -> None:
        """A decode of `n_tokens` behind `position` comes next."""
        self._prefill, self._position, self._n_tokens = prefill, position, n_tokens
        if prefill:
            self._answer_start = position + n_tokens
        if self._route_trace is not None:
            self._route_trace.begin_decode()
        router = self._opened.router
        if router is not None:
            store = router.store
            store.clock += 1
            router.begin_decode(n_tokens, prefill=prefill)
            self._store_before = (store.hits, store.misses, store.evictions)

    def undo_decode(self) -> None:
        """The decode was stopped and will be repeated: what it traced and counted is void."""
        if self._route_trace is not None:
            self._route_trace.undo_decode()
        if self._opened.router is not None:
            self._opened.router.loader.step = StepCounters()

    @contextmanager
    def timed_decode(self) -> Iterator[None]:
        """Brackets llama_decode alone."""
        started = perf_counter_ns()
        try:
            yield
        finally:
            self._wall_ns = perf_counter_ns() - started
            router = self._opened.router
            if self._prefill and router and self._opened.streams and self.metrics.turns:
                turn, step = self.metrics.turns[-1], router.step
                turn.prefill_read_bytes += step.read_bytes
                turn.prefill_reads += step.reads

    def prefilled(self, n_reused: int, seconds: float) -> None:
        """The prompt is in the context."""
        turn = self.metrics.turns[-1]
        turn.n_reused, turn.prefill_s = n_reused, seconds
        self._before = ProcessUse.now()
        self._left_decode_ns = perf_counter_ns()

    def end_token(self, token: int, limit: int) -> None:
        """A token was decoded: write its row."""
        if self._opened.router is not None:
            self._opened.router.token_decoded(self._wall_ns)
        self._step += 1
        now = perf_counter_ns()
        overhead_ns = now - self._left_decode_ns - self._wall_ns
        use, before = ProcessUse.now(), self._before
        router = self._opened.router
        step = router.step if router is not None else StepCounters()
        # What llama.cpp's own mapping reads, and what it costs, nobody here can see.
        store = router.store if router is not None and self._opened.streams else None
        wall, stall, mgmt = self._wall_ns / 1e6, step.stall_ns / 1e6, step.mgmt_ns / 1e6
        io = step.io_ns / 1e6 if router is not None and router.reads_overlap else stall
        if store is None:
            io = stall = mgmt = UNMEASURED
        faults = use.major_faults - before.major_faults
        self.metrics.rows.append(
            TokenRow(
                step=self._step,
                steps=limit,
                wall_ms=wall,
                io_ms=io,
                # Of a plain run this is all of it, the reading of its mapped file included.
                compute_ms=wall - stall - mgmt if store else wall,
                read_bytes=step.read_bytes if store else NOT_COUNTED,
                cache_hit_pct=self._hit_pct(),
                stall_ms=stall,
                mgmt_ms=mgmt,
                majflt=faults,
                cpu_ms=use.cpu_ms - before.cpu_ms,
                dense_resident_frac=UNMEASURED,
                turn=self._turn,
                majflt_mib=faults * 4096 / MIB,
                cache_budget_mib=store.budget_bytes / MIB if store else UNMEASURED,
                rss_mib=use.rss_mib,
                rss_anon_mib=use.rss_anon_mib,
                rss_file_mib=use.rss_file_mib,
                swap_mib=use.swap_mib,
                mem_available_mib=use.mem_available_mib,
                mem_free_mib=use.mem_free_mib,
                swap_free_mib=use.swap_free_mib,
                loop_overhead_ms=overhead_ns / 1e6,
                token_id=token,
                reads=step.reads if store else NOT_COUNTED,
                hits=store.hits - self._store_before[0] if store else NOT_COUNTED,
                misses=store.misses - self._store_before[1] if store else NOT_COUNTED,
                evictions=store.evictions - self._store_before[2] if store else NOT_COUNTED,
                experts_routed=step.routed if router else NOT_COUNTED,
                experts_dropped=step.dropped if router else NOT_COUNTED,
                experts_substituted=step.substituted if router else NOT_COUNTED,
                mass_discarded=step.mass_discarded if router else UNMEASURED,
            )
        )
        self._before = use
        self._left_decode_ns = now
        for trace in (self._route_trace, self._io_trace):
            if trace is not None:
                trace.end_step()

    def end_turn(self) -> None:
        """A generation ended, well or not: what was traced is on disk."""
        for trace in (self._route_trace, self._io_trace):
            if trace is not None:
                trace.end_turn()

    def turn_summary(self) -> dict[str, float]:
        """The figures of the turn that ended."""
        return self.metrics.summary(self._turn)

    def close(self) -> None:
        """Close the traces."""
        for trace in (self._route_trace, self._io_trace):
            if trace is not None:
                trace.close()
        self._route_trace = self._io_trace = None

    def _hit_pct(self) -> float:
        router = self._opened.router
        if router is None or router.store.budget_bytes == 0:
            return UNMEASURED  # no cache
        looked_up = router.store.hits + router.store.misses
        return 100 * router.store.hits / looked_up if looked_up else UNMEASURED

    def _forced(self, options: Diagnostics) -> ForcedRoutes | None:
        router = self._opened.router
        if options.force_routes is None or router is None:
            return None
        layers = self._opened.layers
        forced = ForcedRoutes(
            read_route_trace(options.force_routes),
            len(layers),
            layers[0].n_expert,
            options.guess_accuracy,
        )
        router.routes = self
        return forced

    def ids(self, index: int, n_tokens: int) -> np.ndarray:
        """Forced experts of a routing (`routing.Routes`)."""
        assert self._routes is not None
        return self._routes.ids(self._prefill, self._phase_positions(n_tokens), index)

    def weights(self, index: int, n_tokens: int) -> np.ndarray | None:
        """Forced weights of a routing (`routing.Routes`)."""
        assert self._routes is not None
        return self._routes.weights(self._prefill, self._phase_positions(n_tokens), index)

    def guess(self, index: int, least_share: float) -> list[int]:
        """What guessing a forced routing would have named (`routing.Routes`)."""
        assert self._routes is not None
        positions = self._phase_positions(self._n_tokens)
        named = self._routes.guesses(self._prefill, positions, index)
        if least_share and len(named) == 1:
            weights = self._routes.weights(self._prefill, positions, index)
            if weights is not None:
                named = named[:, policy.shares(weights)[0] >= least_share]
        return list(dict.fromkeys(named.ravel().tolist()))

    def _phase_positions(self, n_rows: int) -> range:
        rows, start = self._positions(n_rows), 0 if self._prefill else self._answer_start
        return range(rows.start - start, rows.stop - start)

    def _positions(self, n_rows: int) -> range:
        """The positions of a routing's rows: the last layer routes only the prompt's end."""
        end = self._position + self._n_tokens
        return range(end - n_rows, end)

    def trace_routes(self, path: Path | None) -> None:
        """Write every routing from the next decode on to a new file; None: stop.

        Raises InputError for a file that cannot be written, or a model without routings to see.
        """
        router = self._opened.router
        if router is None:
            raise InputError("a model that is not streamed shows no routings to trace")
        started = RouteTraceWriter(path, self._model) if path is not None else None
        if self._route_trace is not None:
            self._route_trace.close()
        self._route_trace = started
        router.observer = self._on_routing if started is not None else None
        if started is not None:
            self.metrics.preamble["route_traced"] = 1
        self._opened.hook.mark_nodes()

    def _trace_reads(self, path: Path) -> None:
        assert self._opened.router is not None
        self._io_trace = IoTraceWriter(path, self._model)
        self._opened.router.loader.on_reads = self._on_reads

    def _on_routing(self, routing: Routing) -> None:
        assert self._route_trace is not None
        layer = self._opened.layers[routing.index]
        self._route_trace.add(
            self._turn,
            self._phase,
            np.array(self._positions(len(routing.ids))),
            layer.number,
            expert=routing.ids,
            weight=routing.weights,
            residency=np.where(routing.resident & routing.ahead, PREFETCHED, routing.resident),
            expert_bytes=np.where(routing.read, layer.entry_bytes, 0),
            dropped=routing.dropped,
            substituted=routing.substituted,
        )

    def _on_reads(self, outcomes: Sequence[ReadOutcome]) -> None:
        assert self._io_trace is not None
        layers = {layer.number: layer for layer in self._opened.layers}
        for outcome in outcomes:
            tag = outcome.read.tag
            assert isinstance(tag, ExpertTag)
            bank = next(b for b in layers[tag.layer].banks if b.name == tag.projection)
            self._io_trace.add(
                self._turn,
                self._phase,
                self._position + self._n_tokens - 1,
                tag.layer,
                expert=tag.expert,
                projection=tag.projection,
                lane=outcome.lane,
                speculative=outcome.read.ahead,
                offset=outcome.read.first,
                bytes_wanted=bank.slice_bytes,
                bytes_read=outcome.nbytes,
                latency_us=outcome.latency_ns // 1000,
            )

    @property
    def _phase(self) -> int:
        return PREFILL if self._prefill else DECODE


def trace_model(info: ModelInfo, opened: OpenModel) -> TraceModel:
    """What the traces say of the model."""
    return TraceModel(
        name=info.path,
        arch=info.arch,
        n_layer=info.n_layer,
        n_expert=info.n_expert,
        n_expert_used=info.n_expert_used,
        expert_bytes={layer.number: layer.entry_bytes for layer in opened.layers},
    )


def _is_compiled(options: Diagnostics, opened: OpenModel) -> bool:
    """Whether compiled code loads this run's tokens."""
    router, is_traced = opened.router, options.route_trace or options.io_trace
    return router is not None and not is_traced and router.compiled.would_load(router.guesser)


def preamble(
    info: ModelInfo, resolved: RunConfig, options: Diagnostics, opened: OpenModel
) -> dict[str, object]:
    """The metrics file's head: version, model, resolved configuration, and what marks the run."""
    # Imported here: the version of the installed package is only needed for files.
    from importlib.metadata import PackageNotFoundError, version

    from engine import ggml

    try:
        own_version = version("tuiwork")
    except PackageNotFoundError:
        own_version = "unknown"
    values: dict[str, object] = {
        "version": own_version,
        "llama_cpp": ggml.llama_cpp.__version__,
        "openmp": int(ggml.uses_openmp()),
        # The field's names for what `info` calls otherwise: other readers look for them.
        "model": Path(info.path).name,
        "n_ctx": info.ctx,
        "cpu": cpu_name(),
        **asdict(info),
    }
    for key in SETTINGS:
        if key.partition(".")[0] in ("model", "stream", "routing", "sampling"):
            values.setdefault(key.partition(".")[2].replace("-", "_"), get(resolved, key))
    values |= {
        "moe_stream": int(opened.streams),
        "compiled_core": int(_is_compiled(options, opened)),
        "poison": int(options.poison),
        "forced_routes": int(options.force_routes is not None),
        "random_tokens": -1 if options.random_tokens is None else options.random_tokens,
        "route_traced": int(options.route_trace is not None),
        "io_traced": int(options.io_trace is not None),
    }
    return {key: int(value) if isinstance(value, bool) else value for key, value in values.items()}
