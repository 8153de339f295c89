"""The sizes of the demo model. Every row length is a multiple of 32, as Q8_0 needs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A qwen3moe model in numbers; `n_expert` 0 makes it dense."""

    n_vocab: int = 4096
    n_embd: int = 192
    n_layer: int = 8
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    n_expert: int = 32
    n_used: int = 4
    expert_ff: int = 128
    """width of one expert; of the one feed-forward network if dense"""
    rope_base: float = 10000.0
    norm_eps: float = 1e-6
    n_ctx: int = 2048

    def dense(self) -> Shape:
        """The model without a router that does as much work per token."""
        return dataclasses.replace(
            self, n_expert=0, n_used=0, expert_ff=self.expert_ff * self.n_used
        )

    @property
    def n_parameters(self) -> int:
        """All of them."""
        return self._outside + self.n_layer * max(1, self.n_expert) * self._one_expert

    @property
    def n_active(self) -> int:
        """Those that one token is multiplied with, the table of input embeddings left out."""
        used = self.n_layer * max(1, self.n_used) * self._one_expert
        return self._outside - self.n_vocab * self.n_embd + used

    @property
    def _one_expert(self) -> int:
        return 3 * self.n_embd * self.expert_ff

    @property
    def _outside(self) -> int:
        heads = 2 * self.n_head + 2 * self.n_head_kv
        layer = self.n_embd * (heads * self.head_dim + 2 + self.n_expert) + 2 * self.head_dim
        return self.n_layer * layer + self.n_embd * (2 * self.n_vocab + 1)
