"""What the next layer will probably route to, guessed while the present one computes.

The next layer's own router is applied to what the present layer's router saw
(`engine.router_matrix`). Decoding, a guess names most of the experts that a token routes to; for a
prompt's batch it names all that its tokens will probably need, in the order of the file.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.ggml import Tensor
from engine.graph import GraphPlan
from engine.mapping import ShardMapping
from engine.model_file import ModelFile
from engine.node_values import matrix_at
from engine.router_matrix import Floats, RouterMatrix, likeliest, router_matrix

MOST_UNDER_WAY = 4
"""Experts of one token being read ahead beyond which no more are begun: the disk is behind."""

GUESSED_SHARE = 0.75
"""Of a token's experts, those that are guessed: the weakest are named right too seldom."""

LARGEST_SAMPLE = 64
"""Tokens of a batch from which its experts are guessed: more would name hardly any others."""


@dataclass(frozen=True)
class Guess:
    """A layer's experts, not yet named."""

    index: int
    name: Callable[[], Sequence[int]]
    """Names them, the first to be read first. May run on any thread, if it is not quick."""
    most_under_way: int
    """Experts being read ahead beyond which no more are begun."""
    is_quick: bool
    """Whether naming them costs less than handing it to another thread.

    Then it must be done before the graph goes on, some 0.1 ms.
    """


class Guesser:
    """Guesses each routed layer's experts from the layer before."""

    def __init__(self, routers: Sequence[RouterMatrix | None]) -> None:
        """`routers` of the routed layers, None where one is not understood."""
        self._routers = list(routers)
        pairs = itertools.pairwise(self._routers)
        self._can_guess = [*(None not in pair for pair in pairs), False]
        """By routed layer: whether the one after it can be guessed."""
        self._inputs: dict[int, tuple[int, Tensor, bytes]] = {}

    @property
    def routers(self) -> Sequence[RouterMatrix | None]:
        """Of the routed layers, None where one is not understood."""
        return self._routers

    @property
    def n_guessable(self) -> int:
        """Routed layers that can be guessed."""
        return sum(self._can_guess)

    def next_layer(
        self,
        index: int,
        routing: int,
        top_k: int,
        *,
        least_share: float = 0.0,
        forced: Sequence[int] | None = None,
    ) -> Guess | None:
        """Guess the layer after `index`, whose routing node at address `routing` is computed.

        None where it cannot be guessed. An expert whose share of the token's weight would be below
        `least_share` is not named. `forced` replaces what is named, not the work for it.
        """
        if not self._can_guess[index]:
            return None
        tensor = self._input_tensor(index, routing)
        n_tokens = tensor.ne[1]
        if n_tokens == 0:
            return None
        following = self._routers[index + 1]
        assert following is not None
        is_one = n_tokens == 1
        is_quick = is_one and following.is_quick
        if not is_quick:
            # While a lane looks at it, the graph goes on and may use its memory again.
            inputs = matrix_at(tensor, ctypes.c_float)[:: -(-n_tokens // LARGEST_SAMPLE)].copy()
        sure = math.ceil(GUESSED_SHARE * top_k)

        def name() -> Sequence[int]:
            # At once, the input is still where the graph has it.
            scores = following.scores_of_one(tensor.data) if is_quick else following.scores(inputs)
            named = likeliest(scores, top_k)
            if is_one and least_share:
                named = named[: following.n_above(least_share, scores[0, named])]
            if forced is not None:
                named = list(forced)
            return named[:sure] if is_one else sorted(named)

        most = MOST_UNDER_WAY if is_one else len(following.matrix)
        return Guess(index + 1, name, most, is_quick)

    def ranked_next(self, index: int, routing: int, top_k: int) -> list[int] | None:
        """All `top_k` that the next layer would be guessed to route to; None: not guessable."""
        if not self._can_guess[index]:
            return None
        following = self._routers[index + 1]
        assert following is not None
        tensor = self._input_tensor(index, routing)
        if tensor.ne[1] == 1 and following.is_quick:
            return likeliest(following.scores_of_one(tensor.data), top_k)
        return likeliest(following.scores(self.router_input(index, routing)), top_k)

    def same_layer(self, index: int, routing: int, top_k: int) -> list[int]:
        """What the layer itself routes to: the control, which must always be right."""
        router = self._routers[index]
        assert router is not None
        return likeliest(router.scores(self.router_input(index, routing)), top_k)

    def input_address(self, index: int, routing: int) -> int:
        """Where the first token's input of a layer's router is; 0: the next is not guessable."""
        return self._input_tensor(index, routing).data or 0 if self._can_guess[index] else 0

    def router_input(self, index: int, routing: int) -> Floats:
        """What a layer's router saw, tokens by width, over the graph's own memory."""
        return matrix_at(self._input_tensor(index, routing), ctypes.c_float)

    def _input_tensor(self, index: int, routing: int) -> Tensor:
        known = self._inputs.get(index)
        # The same address may hold another node of a rebuilt graph; its name tells.
        if known is None or known[0] != routing or known[1].name != known[2]:
            router = self._routers[index]
            assert router is not None
            tensor = Tensor.from_address(routing)
            for source in router.plan.path:
                tensor = Tensor.from_address(tensor.src[source])
            known = self._inputs[index] = (routing, tensor, tensor.name)
        return known[1]


def model_guesser(plan: GraphPlan, file: ModelFile, mappings: Sequence[ShardMapping]) -> Guesser:
    """The guesser of a model's graph, over the router weights where llama.cpp has them."""

    def weight(name: str) -> Floats | None:
        entry = file.tensors.get(name)
        if entry is None or entry.type_name != "f32":
            return None
        address = mappings[entry.shard].base + entry.offset
        memory: Any = (ctypes.c_char * entry.nbytes).from_address(address)
        array: npt.NDArray[np.float32] = np.ndarray(entry.shape[::-1], np.float32, memory)
        return array

    return Guesser(
        [
            router_matrix(layer.router, weight) if layer.router is not None else None
            for layer in plan.layers
        ]
    )
