"""Two optimizers in one: Muon for matrices, Adam for embeddings, router and norms.

Muon makes every step of a matrix orthogonal, which lets rare facts move the weights as far as
frequent ones do: in few tokens that is worth more than what it costs.

Parameters, gradients and state lie in shared memory. Each of several processes brings its own
gradients and then steps its own part of the parameters.
"""

from __future__ import annotations

import math
from typing import Any

import torch

MUON_LR = 0.012
ADAM_LR = 0.004
_MOMENTUM = 0.95
_BETAS = (0.9, 0.97)
_EPS = 1e-10
_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "gate", "up", "down")


def orthogonal(gradients: Any) -> Any:
    """The nearest orthogonal matrices, by five Newton-Schulz steps. [n, rows, columns]."""
    x = gradients.bfloat16()
    x = x / (x.float().norm(dim=(1, 2), keepdim=True) + 1e-7).bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    for _ in range(5):
        a = x @ x.transpose(1, 2)
        x = 3.4445 * x + (torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315) @ x)
    return x.transpose(1, 2) if tall else x


class Optimizer:
    """Steps the parameters of a model for `n_workers` processes; its state can be kept."""

    def __init__(self, model: Any, n_workers: int) -> None:
        """To be made before the processes part; moves the model into shared memory."""
        model.share_memory()
        self._parameters = dict(model.named_parameters())
        self._is_matrix = {n: n.rsplit(".", 1)[-1] in _MATRICES for n in self._parameters}
        self.gradients = [self._zeros() for _ in range(n_workers)]
        self._momentum, self._squares = self._zeros(), self._zeros()
        # The costly ones first, each to the process that has least to do.
        self._own: list[list[str]] = [[] for _ in range(n_workers)]
        cost = [0.0] * n_workers
        for name in sorted(self._parameters, key=lambda n: -self._cost(n)):
            worker = cost.index(min(cost))
            self._own[worker].append(name)
            cost[worker] += self._cost(name)

    def begin(self, worker: int) -> None:
        """Let the gradients of this process's model gather where the others find them."""
        for name, parameter in self._parameters.items():
            gradient = self.gradients[worker][name]
            parameter.grad = gradient.zero_()

    @torch.no_grad()
    def step(self, worker: int, number: int, factor: float) -> None:
        """Step this process's part, when all gradients are there: step `number`, counted from 1,
        with this share of the full learning rates."""
        for name in self._own[worker]:
            gradient = self.gradients[0][name]
            for others in self.gradients[1:]:
                gradient += others[name]
            gradient /= len(self.gradients)
            if self._is_matrix[name]:
                self._muon(name, gradient, MUON_LR * factor)
            else:
                self._adam(name, gradient, number, ADAM_LR * factor)

    def _muon(self, name: str, gradient: Any, lr: float) -> None:
        momentum = self._momentum[name].lerp_(gradient, 1 - _MOMENTUM)
        update = gradient.lerp(momentum, _MOMENTUM)
        update = orthogonal(update if update.ndim == 3 else update[None])
        parameter = self._parameters[name]
        rows, columns = parameter.shape[-2:]
        scale = math.sqrt(max(1.0, rows / columns))
        parameter.add_(update.view_as(parameter), alpha=-lr * scale)

    def _adam(self, name: str, gradient: Any, number: int, lr: float) -> None:
        mean = self._momentum[name].lerp_(gradient, 1 - _BETAS[0])
        square = (
            self._squares[name].mul_(_BETAS[1]).addcmul_(gradient, gradient, value=1 - _BETAS[1])
        )
        root = (square / (1 - _BETAS[1] ** number)).sqrt_().add_(_EPS)
        self._parameters[name].addcdiv_(mean, root, value=-lr / (1 - _BETAS[0] ** number))

    def _cost(self, name: str) -> float:
        numbers = int(self._parameters[name].numel())
        return numbers * (10.0 if self._is_matrix[name] else 1.0)

    def _zeros(self) -> dict[str, Any]:
        return {n: torch.zeros_like(p).share_memory_() for n, p in self._parameters.items()}

    def state_dict(self) -> dict[str, Any]:
        """What a later run needs to go on."""
        return {"momentum": self._momentum, "squares": self._squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        for own, saved in ((self._momentum, "momentum"), (self._squares, "squares")):
            for name, value in state[saved].items():
                own[name].copy_(value)
