"""The experts of a layer as one operation: tokens sorted by expert, a product for each expert.

No token is left out, however many choose one expert. The matrices are multiplied in bfloat16: in
single precision most of a step's time would go into them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function
from torch.nn.functional import silu

_ROWS = 64
"""An expert's tokens are filled up to a multiple of this: the library that multiplies prepares
itself for every new size, and that takes longer than the product."""


class RunExperts(Function):
    """Weighted sum of the chosen experts' outputs for every token."""

    @staticmethod
    def forward(ctx: Any, x: Any, chosen: Any, weights: Any, gate_up: Any, down: Any) -> Any:
        """Tokens [n, d] in bfloat16, chosen experts and weights [n, k], matrices [e, 2f, d] and
        [e, d, f]; gives [n, d] in single precision."""
        n, k = chosen.shape
        spans, source, place = _sort(chosen, len(down))
        rows = torch.cat((x, x.new_zeros(1, x.shape[1]))).index_select(0, source)
        hidden = rows.new_empty(len(source), gate_up.shape[1])
        for e, start, stop in spans:
            torch.mm(rows[start:stop], gate_up[e].t(), out=hidden[start:stop])
        gate, up = hidden.chunk(2, 1)
        scale = rows.new_zeros(len(source), 1)
        scale[place, 0] = weights.reshape(-1).to(x.dtype)
        # A weight may be applied before the last matrix as well as after it; here rows are short.
        inner = silu(gate) * up
        scaled = inner * scale
        out = torch.empty_like(rows)
        for e, start, stop in spans:
            torch.mm(scaled[start:stop], down[e].t(), out=out[start:stop])
        ctx.save_for_backward(rows, hidden, inner, scaled, scale, source, place, gate_up, down)
        ctx.spans = spans
        return out.index_select(0, place).view(n, k, -1).sum(1, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The gradients of tokens, weights and matrices; the choice has none."""
        rows, hidden, inner, scaled, scale, source, place, gate_up, down = ctx.saved_tensors
        outer = gradients[0].to(rows.dtype)
        n = len(outer)
        outer = torch.cat((outer, outer.new_zeros(1, outer.shape[1]))).index_select(0, source)
        d_scaled = torch.empty_like(inner)
        d_down, d_gate_up = torch.zeros_like(down), torch.zeros_like(gate_up)
        for e, start, stop in ctx.spans:
            torch.mm(outer[start:stop], down[e], out=d_scaled[start:stop])
            torch.mm(outer[start:stop].t(), scaled[start:stop], out=d_down[e])
        d_weights = (d_scaled * inner).sum(1, dtype=torch.float32).index_select(0, place)
        d_inner = d_scaled.mul_(scale)
        gate, up = hidden.chunk(2, 1)
        d_hidden = torch.empty_like(hidden)
        d_gate, d_up = d_hidden.chunk(2, 1)
        d_gate.copy_(torch.ops.aten.silu_backward(d_inner * up, gate))
        d_up.copy_(silu(gate).mul_(d_inner))
        d_rows = torch.empty_like(rows)
        for e, start, stop in ctx.spans:
            torch.mm(d_hidden[start:stop], gate_up[e], out=d_rows[start:stop])
            torch.mm(d_hidden[start:stop].t(), rows[start:stop], out=d_gate_up[e])
        d_x = d_rows.index_select(0, place).view(n, -1, d_rows.shape[1]).sum(1)
        return d_x, None, d_weights.view(n, -1), d_gate_up, d_down


def _sort(chosen: Any, n_expert: int) -> tuple[list[tuple[int, int, int]], Any, Any]:
    """Which rows each expert gets as (expert, start, stop); each row's token, one past the last
    if it only fills up; and the row of each choice."""
    n, k = chosen.shape
    flat = chosen.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=n_expert)
    full = (counts + _ROWS - 1) // _ROWS * _ROWS
    stops = full.cumsum(0)
    shift = (stops - full) - (counts.cumsum(0) - counts)
    rows = torch.arange(len(flat)) + shift[flat[order]]
    source = torch.full((int(stops[-1]),), n)
    source[rows] = order // k
    place = torch.empty_like(order)
    place[order] = rows
    bounds = [0, *stops.tolist()]
    spans = [(e, bounds[e], bounds[e + 1]) for e in range(n_expert) if bounds[e + 1] > bounds[e]]
    return spans, source, place
