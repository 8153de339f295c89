"""The loss over the vocabulary, a piece at a time, so that logits stay in the processor's cache."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

_ROWS = 512


class WeightedLoss(Function):
    """Cross entropy in nats, averaged with a weight for each token."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, output: Any, targets: Any, weights: Any) -> Any:
        """Hidden states [n, d], the output matrix [v, d], target ids and weights [n]."""
        total = hidden.new_zeros(())
        share = weights / weights.sum().clamp_min(1e-6)
        d_hidden = torch.empty_like(hidden)
        d_output = torch.zeros_like(output)
        narrow = output.bfloat16()
        for start in range(0, len(hidden), _ROWS):
            part = slice(start, start + _ROWS)
            logits = hidden[part] @ output.t()
            largest = logits.amax(1, keepdim=True)
            chances = logits.sub_(largest).exp()
            sums = chances.sum(1, keepdim=True)
            rows = torch.arange(len(chances))
            picked = chances[rows, targets[part]] / sums[:, 0]
            total += (share[part] * -picked.clamp_min(1e-30).log()).sum()
            chances.mul_(share[part][:, None] / sums)
            chances[rows, targets[part]] -= share[part]
            gradient = chances.bfloat16()
            d_hidden[part] = (gradient @ narrow).float()
            d_output += (gradient.t() @ hidden[part].bfloat16()).float()
        ctx.save_for_backward(d_hidden, d_output)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The gradients, made with the loss because the logits were at hand."""
        d_hidden, d_output = ctx.saved_tensors
        return d_hidden * gradients[0], d_output * gradients[0], None, None
