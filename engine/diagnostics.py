"""Ways to run that are for measuring and proving, not for answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.config import RunConfig
from engine.errors import InputError
from engine.traces import DECODE, PREFILL, RouteTrace, read_route_trace


@dataclass(frozen=True)
class Diagnostics:
    """What a run records beside its answer, and what it is fed instead of its own choices."""

    force_routes: Path | None = None
    """A route trace whose routings replace the router's (a synthetic model routes at random)."""
    random_tokens: int | None = None
    """Seed of random tokens that replace the sampled ones, so that runs are comparable."""
    poison: bool = False
    """Fill every expert slice that is not loaded with NaN patterns."""
    route_trace: Path | None = None
    io_trace: Path | None = None

    @property
    def observes(self) -> bool:
        """Whether routings must be seen even where nothing is streamed."""
        return self.force_routes is not None or self.route_trace is not None

    def adjust(self, config: RunConfig) -> RunConfig:
        """The configuration that these diagnostics need: a forced trace brings its own top-k."""
        if self.force_routes is None:
            return config
        top_k = read_route_trace(self.force_routes).model.n_expert_used
        return config.replace({"routing.n-expert-used": top_k})

    def random_token(self, place: int, n_vocab: int) -> int:
        """The token fed at `place` of an answer."""
        return int(np.random.default_rng((self.random_tokens or 0, place)).integers(n_vocab))


class ForcedRoutes:
    """A recorded run's routings, replayed by position; repeats from its start when it ends."""

    def __init__(self, trace: RouteTrace, n_layers: int, n_expert: int) -> None:
        model = trace.model
        if model.n_layer < n_layers or model.n_expert > n_expert:
            raise InputError(
                f"{trace.path}: its routings ({model.n_layer} layers, {model.n_expert} experts) do "
                f"not fit this model ({n_layers} layers, {n_expert} experts)"
            )
        self._by_phase = {phase: self._table(trace, phase, n_layers) for phase in (PREFILL, DECODE)}
        if len(self._by_phase[DECODE]) == 0:
            raise InputError(f"{trace.path}: has no decoded token whose routings could be forced")

    @staticmethod
    def _table(trace: RouteTrace, phase: int, n_layers: int) -> np.ndarray:
        """Ids by (step, layer, slot), for the steps that routed every layer."""
        rows = (trace.phase == phase) & (trace.layer < n_layers)
        top_k = trace.model.n_expert_used
        steps, place = np.unique(
            np.stack([trace.turn[rows], trace.step[rows]]), axis=1, return_inverse=True
        )
        table = np.full((steps.shape[1], n_layers, top_k), -1, np.int32)
        table[place.ravel(), trace.layer[rows], trace.slot[rows]] = trace.expert[rows]
        if phase == PREFILL:
            # The last layer routes only the prompt's end; its other steps borrow the layer before.
            missing = table < 0
            table = np.where(missing, np.roll(table, 1, axis=1), table)
        return table[(table >= 0).all(axis=(1, 2))]

    def ids(self, prefill: bool, positions: np.ndarray, index: int) -> np.ndarray:
        """Ids (tokens by slots) for positions counted from the phase's start."""
        table = self._by_phase[PREFILL if prefill else DECODE]
        if len(table) == 0:
            table = self._by_phase[DECODE]
        ids: np.ndarray = table[positions % len(table), index]
        return ids
