"""How a layer's router ranks its experts, learned from the graph and done again in numpy.

    scores = act(W @ x + bias) + selection_bias

`act` is what the graph applies before it ranks (softmax, sigmoid or nothing).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from engine.vector_product import VectorProduct, can_multiply

Floats = npt.NDArray[np.float32]

QUICK_BYTES = 2 << 20
"""A router that is applied to a token at once; a larger one by a lane, while the model computes.

Measured with one of 1 MiB: at once is faster where every core computes, and no different with a
core to spare (docs/performance.md).
"""


@dataclass(frozen=True)
class RouterPlan:
    """Where a router's parts are in a graph: names of weights, and the way to its input."""

    path: tuple[int, ...]
    """From the routing node to the router's input: which source of each node leads there."""
    matrix: str
    bias: str | None = None
    selection_bias: str | None = None
    """Added to the activated values for ranking only."""
    activation: str = ""
    """SOFT_MAX, UNARY (a sigmoid) or nothing."""


@dataclass(frozen=True)
class RouterMatrix:
    """A router as arrays over the model's own memory."""

    plan: RouterPlan
    matrix: Floats
    """Experts by width."""
    bias: Floats | None
    selection_bias: Floats | None

    @cached_property
    def is_quick(self) -> bool:
        """Whether `scores_of_one` costs next to nothing."""
        return self.matrix.nbytes <= QUICK_BYTES and can_multiply(self.matrix)

    def scores(self, inputs: Floats) -> Floats:
        """What experts are ranked by: tokens by experts, for inputs of tokens by width."""
        # No BLAS: its threads spin on the cores that llama.cpp's threads are bound to.
        values: Floats
        if len(inputs) == 1:
            values = np.einsum("ij,j->i", self.matrix, inputs[0])[None]
        else:
            values = np.einsum("tj,ij->ti", inputs, self.matrix)
        return self._ranked_by(values)

    def scores_of_one(self, address: int) -> Floats:
        """Nearly the same for the one token whose input is at `address`, if this `is_quick`."""
        return self._ranked_by(self.product.with_vector_at(address)[None])

    @cached_property
    def product(self) -> VectorProduct:
        """What `scores_of_one` multiplies with."""
        return VectorProduct(self.matrix)

    def _ranked_by(self, values: Floats) -> Floats:
        if self.bias is not None:
            values = values + self.bias
        # Without a selection bias, an activation does not change the order.
        if self.selection_bias is not None:
            values = _activated(values, self.plan.activation) + self.selection_bias
        return values

    def n_above(self, share: float, ranked: Floats) -> int:
        """How many of a token's experts weigh more than `share` of all its weight, from the first.

        `ranked` are their scores, the highest first. A guess: the model may scale weights later.
        """
        if self.plan.activation == "UNARY":
            weights = _activated(ranked, "UNARY")
        else:
            weights = np.exp(ranked - ranked[0])
        return int(np.count_nonzero(weights >= share * weights.sum()))


def likeliest(scores: Floats, top_k: int) -> list[int]:
    """The experts among the `top_k` highest of some token, those of most tokens first."""
    if len(scores) == 1:
        ranked: list[int] = scores[0].argsort()[::-1][:top_k].tolist()
        return ranked
    chosen = np.argpartition(scores, -top_k, axis=1)[:, -top_k:]
    times = np.bincount(chosen.ravel(), minlength=scores.shape[1])
    order = np.argsort(-times, kind="stable")[: np.count_nonzero(times)]
    named: list[int] = order.tolist()
    return named


def router_matrix(plan: RouterPlan, weight: Callable[[str], Floats | None]) -> RouterMatrix | None:
    """The router that `plan` names; None where a part is stored in a way that cannot be used."""
    matrix = weight(plan.matrix)
    if matrix is None or matrix.ndim != 2:
        return None
    parts: list[Floats | None] = []
    for name in (plan.bias, plan.selection_bias):
        part = weight(name) if name else None
        if name and part is None:
            return None
        parts.append(part)
    return RouterMatrix(plan, matrix, *parts)


def _activated(values: Floats, activation: str) -> Floats:
    if activation == "SOFT_MAX":
        raised = np.exp(values - values.max(axis=1, keepdims=True))
        shares: Floats = raised / raised.sum(axis=1, keepdims=True)
        return shares
    if activation == "UNARY":
        squashed = 1 / (1 + np.exp(-values))
        return squashed.astype(np.float32)
    return values
