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
    guess_accuracy: float = 0.85
    """Of forced routes: the share of a routing's experts that guessing it beforehand names."""
    random_tokens: int | None = None
    """Seed of random tokens that replace the sampled ones, so that runs are comparable."""
    poison: bool = False
    """Fill every expert slice that is not loaded with NaN patterns."""
    interpreted: bool = False
    """Load tokens in Python although there is compiled code for it."""
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
    """A recorded run's routings and weights by position; begins again when it ends."""

    def __init__(
        self, trace: RouteTrace, n_layers: int, n_expert: int, guess_accuracy: float = 0.85
    ) -> None:
        model = trace.model
        if model.n_layer < n_layers or model.n_expert > n_expert:
            raise InputError(
                f"{trace.path}: its routings ({model.n_layer} layers, {model.n_expert} experts) do "
                f"not fit this model ({n_layers} layers, {n_expert} experts)"
            )
        self._tables = {phase: _tables(trace, phase, n_layers) for phase in (PREFILL, DECODE)}
        self._guesses = {
            phase: _guesses(table[0], guess_accuracy) for phase, table in self._tables.items()
        }
        if len(self._tables[DECODE][0]) == 0:
            raise InputError(f"{trace.path}: has no decoded token whose routings could be forced")

    def ids(self, prefill: bool, positions: range, index: int) -> np.ndarray:
        """Ids (tokens by slots) for positions counted from the phase's start."""
        return _rows(self._tables[self._phase(prefill)][0], positions, index)

    def weights(self, prefill: bool, positions: range, index: int) -> np.ndarray | None:
        """The recorded final weights of `ids`, or None if the trace has not all of them."""
        table = self._tables[self._phase(prefill)][1]
        return None if table is None else _rows(table, positions, index)

    def guesses(self, prefill: bool, positions: range, index: int) -> np.ndarray:
        """`ids`, some of them wrong: what a guess of them would have named."""
        return _rows(self._guesses[self._phase(prefill)], positions, index)

    def _phase(self, prefill: bool) -> int:
        """Where to look: a trace without a prompt has its decoded tokens alone."""
        return PREFILL if prefill and len(self._tables[PREFILL][0]) else DECODE


def _rows(table: np.ndarray, positions: range, index: int) -> np.ndarray:
    """A layer's rows of a table that begins again when it ends."""
    first = positions.start % len(table)
    # One token's routing is to cost as little as if it were not forced: a slice, and no copy.
    if len(positions) == 1:
        rows: np.ndarray = table[first : first + 1, index]
    else:
        rows = table[np.arange(first, first + len(positions)) % len(table), index]
    return rows


def _guesses(ids: np.ndarray, accuracy: float) -> np.ndarray:
    """What guesses of `ids` (steps, layers, slots) would have named, `accuracy` of it right.

    As with real guesses, the router's weaker choices are missed more often, and what is named
    instead is what the layer often routes to: the choice of another step.
    """
    rng = np.random.default_rng(0)
    steps, _, slots = ids.shape
    lean = np.linspace(-1, 1, slots) if slots > 1 else np.zeros(1)
    wrong = rng.random(ids.shape) < (1 - accuracy) * (1 + lean)
    others = np.take_along_axis(ids, rng.integers(max(steps, 1), size=ids.shape), axis=0)
    return np.where(wrong, others, ids)


def _tables(trace: RouteTrace, phase: int, n_layers: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Ids and weights by (step, layer, slot), for the steps that routed every layer."""
    rows = (trace.phase == phase) & (trace.layer < n_layers)
    steps, place = np.unique(
        np.stack([trace.turn[rows], trace.step[rows]]), axis=1, return_inverse=True
    )
    at = place.ravel(), trace.layer[rows], trace.slot[rows]
    ids = np.full((steps.shape[1], n_layers, trace.model.n_expert_used), -1, np.int32)
    ids[at] = trace.expert[rows]
    weights = None
    if trace.weight is not None and np.isfinite(trace.weight[rows]).all():
        weights = np.zeros(ids.shape, np.float32)
        weights[at] = trace.weight[rows]
    if phase == PREFILL:
        # The last layer may route only the prompt's end; its other steps borrow the layer before.
        missing = ids < 0
        ids = np.where(missing, np.roll(ids, 1, axis=1), ids)
        if weights is not None:
            weights = np.where(missing, np.roll(weights, 1, axis=1), weights)
    whole = (ids >= 0).all(axis=(1, 2))
    return ids[whole], None if weights is None else weights[whole]
