"""How well a token's experts can be guessed, and how unevenly they are used, layer by layer.

Accuracy is the share of decoded tokens' routed slots whose expert was among the guessed ones; a
guess is as many experts as the routing has slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.replay_lossy import percent
from engine.trace_table import IntArray
from engine.traces import RouteTrace

BoolArray = npt.NDArray[np.bool_]

PREDICTORS: dict[str, str] = {
    "previous": "the experts that the token before routed in this layer",
    "popular-so-far": "the layer's most routed experts before this token, the prompt included",
    "popular-overall": "the layer's most routed experts of all decoded tokens: known only after",
}
"""Every predictor and what it guesses."""


@dataclass(frozen=True)
class Accuracy:
    """How often a predictor named the expert that came, in percent."""

    predictor: str
    hit_pct: float | None
    """Over the slots of all layers for which there was anything to guess from."""
    layers: dict[int, float | None]


@dataclass(frozen=True)
class LayerPopularity:
    """How often each expert of a layer was routed by decoded tokens."""

    layer: int
    counts: list[int]
    """By expert."""

    @property
    def routed(self) -> int:
        """All routed slots."""
        return sum(self.counts)

    @property
    def distinct(self) -> int:
        """Experts that were routed at all."""
        return sum(1 for count in self.counts if count)

    @property
    def experts_for_half(self) -> int:
        """The fewest experts that take half of the routed slots."""
        taken = np.cumsum(sorted(self.counts, reverse=True))
        return int(np.searchsorted(taken, self.routed / 2)) + 1 if self.routed else 0

    def top(self, n: int) -> list[tuple[int, float]]:
        """The `n` most routed experts with their percentage of the slots, the lower id first."""
        order = sorted(range(len(self.counts)), key=lambda expert: -self.counts[expert])
        return [(e, 100 * self.counts[e] / self.routed) for e in order[:n] if self.counts[e]]


def accuracies(trace: RouteTrace) -> list[Accuracy]:
    """How well each of PREDICTORS does on the trace."""
    judges: dict[str, Callable[[RouteTrace], tuple[BoolArray, BoolArray]]] = {
        "previous": _previous,
        "popular-so-far": _popular_so_far,
        "popular-overall": _popular_overall,
    }
    layers = np.unique(trace.layer[trace.decode]).tolist()
    found = []
    for name, judge in judges.items():
        right, guessed = judge(trace)
        guessed = guessed & trace.decode
        by_layer = {}
        for layer in layers:
            here = guessed & (trace.layer == layer)
            by_layer[layer] = percent(right[here].sum(), here.sum())
        found.append(Accuracy(name, percent(right[guessed].sum(), guessed.sum()), by_layer))
    return found


def popularity(trace: RouteTrace) -> list[LayerPopularity]:
    """Expert popularity over the decode rows, for each layer that has any."""
    n_expert = trace.model.n_expert
    layer, expert = trace.layer[trace.decode], trace.expert[trace.decode]
    return [
        LayerPopularity(number, np.bincount(expert[layer == number], minlength=n_expert).tolist())
        for number in np.unique(layer).tolist()
    ]


def _previous(trace: RouteTrace) -> tuple[BoolArray, BoolArray]:
    """Rows whose expert the token before routed too; rows for which there is such a token."""
    order = np.lexsort((trace.slot, trace.step, trace.layer, trace.turn))
    turn, layer, step = trace.turn[order], trace.layer[order], trace.step[order]
    new_timeline = _changes(turn) | _changes(layer)
    token = np.cumsum(new_timeline | _changes(step))
    code = token * trace.model.n_expert + trace.expert[order]
    right = np.isin(code - trace.model.n_expert, code)
    first_tokens = token[new_timeline]
    guessed = ~np.isin(token, first_tokens)
    return _unsorted(right & guessed, order), _unsorted(guessed, order)


def _popular_so_far(trace: RouteTrace) -> tuple[BoolArray, BoolArray]:
    right = np.zeros(len(trace), dtype=np.bool_)
    guessed = np.zeros(len(trace), dtype=np.bool_)
    for layer in np.unique(trace.layer).tolist():
        rows = np.flatnonzero(trace.layer == layer)
        _, call = np.unique(trace.call[rows], return_inverse=True)
        used = np.zeros((int(call.max()) + 1, trace.model.n_expert), dtype=np.int64)
        np.add.at(used, (call, trace.expert[rows]), 1)
        before = np.cumsum(used, axis=0) - used
        right[rows] = _among_top(before, call, trace.expert[rows], _top_k(trace)[rows])
        guessed[rows] = before.sum(axis=1)[call] > 0
    return right, guessed


def _popular_overall(trace: RouteTrace) -> tuple[BoolArray, BoolArray]:
    counts = np.zeros((trace.model.n_layer, trace.model.n_expert), dtype=np.int64)
    np.add.at(counts, (trace.layer[trace.decode], trace.expert[trace.decode]), 1)
    right = _among_top(counts, trace.layer, trace.expert, _top_k(trace))
    return right, np.ones(len(trace), dtype=np.bool_)


def _among_top(counts: IntArray, line: IntArray, expert: IntArray, top_k: IntArray) -> BoolArray:
    """Whether each expert is one of the `top_k` most counted, above 0, of its line of `counts`.

    Among equals the lower expert comes first.
    """
    order = np.argsort(-counts, axis=1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(counts.shape[1])[None, :], axis=1)
    among: BoolArray = (rank[line, expert] < top_k) & (counts[line, expert] > 0)
    return among


def _top_k(trace: RouteTrace) -> IntArray:
    """How many slots each row's routing has."""
    routing = np.cumsum(trace.slot == 0) - 1
    sizes: IntArray = np.bincount(routing)[routing]
    return sizes


def _changes(values: IntArray) -> BoolArray:
    return np.concatenate([[True], values[1:] != values[:-1]])


def _unsorted(values: BoolArray, order: IntArray) -> BoolArray:
    back = np.empty_like(values)
    back[order] = values
    return back
