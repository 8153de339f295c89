"""The demo model for training: what llama.cpp calls qwen3moe, in PyTorch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from engine.demo.experts import RunExperts
from engine.demo.shape import Shape

BF16 = torch.bfloat16


def _matrix(*size: int, fan_in: int, gain: float = 1.0) -> Any:
    return nn.Parameter(torch.randn(*size) * (gain * fan_in**-0.5))


def _norm(x: Any, weight: Any, eps: float) -> Any:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


class Layer(nn.Module):
    """Attention, then experts (or one network, if dense)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        d, f = shape.n_embd, shape.expert_ff
        q, kv = shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
        small = (2 * shape.n_layer) ** -0.5
        self.attn_norm = nn.Parameter(torch.ones(d))
        self.attn_q = _matrix(q, d, fan_in=d)
        self.attn_k = _matrix(kv, d, fan_in=d)
        self.attn_v = _matrix(kv, d, fan_in=d)
        self.attn_output = _matrix(d, q, fan_in=q, gain=small)
        self.attn_q_norm = nn.Parameter(torch.ones(shape.head_dim))
        self.attn_k_norm = nn.Parameter(torch.ones(shape.head_dim))
        self.ffn_norm = nn.Parameter(torch.ones(d))
        n = max(1, shape.n_expert)
        if shape.n_expert:
            self.router = _matrix(n, d, fan_in=d)
        self.gate = _matrix(n, f, d, fan_in=d)
        self.up = _matrix(n, f, d, fan_in=d)
        self.down = _matrix(n, d, f, fan_in=f, gain=small)

    def forward(self, x: Any, mask: Any, turn: Any) -> Any:
        """Tokens [b, t, d] to (the same, the balance loss, routed tokens per expert)."""
        x = x + self._attention(_norm(x, self.attn_norm, self.shape.norm_eps), mask, turn)
        inside = _norm(x, self.ffn_norm, self.shape.norm_eps)
        if not self.shape.n_expert:
            inner = inside.to(BF16)
            gate, up = (inner @ m[0].to(BF16).t() for m in (self.gate, self.up))
            out = (F.silu(gate) * up) @ self.down[0].to(BF16).t()
            return x + out.float(), x.new_zeros(()), x.new_zeros(1)
        flat = inside.view(-1, self.shape.n_embd)
        logits = flat @ self.router.t()
        chances = logits.softmax(-1)
        top, chosen = chances.topk(self.shape.n_used, -1)
        weights = top / top.sum(-1, keepdim=True)
        counts = torch.bincount(chosen.reshape(-1), minlength=self.shape.n_expert)
        load = counts.float() / chosen.numel()
        # Switch's balance loss, 1 if even; and what keeps the router's logits small.
        balance = self.shape.n_expert * (load * chances.mean(0)).sum()
        balance = balance + 0.1 * logits.logsumexp(-1).square().mean()
        matrices = torch.cat((self.gate.to(BF16), self.up.to(BF16)), 1)
        out = RunExperts.apply(flat.to(BF16), chosen, weights, matrices, self.down.to(BF16))
        return x + out.view_as(x), balance, counts

    def _attention(self, x: Any, mask: Any, turn: Any) -> Any:
        b, t, _ = x.shape
        shape = self.shape
        x = x.to(BF16)
        q, k, v = (
            (x @ m.to(BF16).t()).view(b, t, -1, shape.head_dim)
            for m in (self.attn_q, self.attn_k, self.attn_v)
        )
        q = _rotate(_norm(q.float(), self.attn_q_norm, shape.norm_eps), turn)
        k = _rotate(_norm(k.float(), self.attn_k_norm, shape.norm_eps), turn)
        times = shape.n_head // shape.n_head_kv
        k, v = (m.to(BF16).repeat_interleave(times, 2) for m in (k, v))
        q, k, v = (m.to(BF16).transpose(1, 2) for m in (q, k, v))
        # Written out: at this size twice as fast as PyTorch's own operation.
        out = ((q @ k.transpose(2, 3)) * shape.head_dim**-0.5 + mask).softmax(-1) @ v
        out = out.transpose(1, 2).reshape(b, t, -1)
        return (out @ self.attn_output.to(BF16).t()).float()


def _rotate(x: Any, turn: Any) -> Any:
    # NeoX: the first half of a head is rotated against the second.
    cos, sin = turn
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Model(nn.Module):
    """Token ids to hidden states; the loss takes them on to the vocabulary."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Parameter(torch.randn(shape.n_vocab, shape.n_embd) * 0.5)
        self.output_norm = nn.Parameter(torch.ones(shape.n_embd))
        self.output = nn.Parameter(torch.randn(shape.n_vocab, shape.n_embd) * 0.02)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.n_layer))

    def forward(self, tokens: Any, documents: Any) -> Any:
        """Ids and document numbers [b, t] to (hidden states, balance loss, loads [layers, e]).

        A token sees only what came before it in its own document.
        """
        t = tokens.shape[1]
        same = documents[:, :, None] == documents[:, None, :]
        seen = same & torch.ones(t, t, dtype=torch.bool).tril()
        mask = torch.zeros(seen.shape, dtype=BF16).masked_fill_(~seen, -1e4)[:, None]
        half = self.shape.head_dim // 2
        speed = self.shape.rope_base ** (-torch.arange(half) / half)
        angle = torch.arange(t)[:, None] * speed
        turn = (angle.cos()[:, None], angle.sin()[:, None])
        x = F.embedding(tokens, self.token_embd)
        balance, loads = x.new_zeros(()), []
        for layer in self.layers:
            x, more, load = layer(x, mask, turn)
            balance = balance + more / len(self.layers)
            loads.append(load)
        return _norm(x, self.output_norm, self.shape.norm_eps), balance, torch.stack(loads)
