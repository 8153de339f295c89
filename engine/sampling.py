"""How the next token is chosen from the logits."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.config import SamplingPart
from engine.ggml import llama


class Sampler:
    """Greedy by numpy, everything else by llama.cpp's sampler chain."""

    def __init__(self, part: SamplingPart) -> None:
        self.part = part
        self._chain: Any = None
        if part.temp > 0:
            self._chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
            for stage in self._stages():
                llama.llama_sampler_chain_add(self._chain, stage)

    def choose(self, context: Any, logits: np.ndarray) -> int:
        """The next token, from the last logits of `context`."""
        if self._chain is None:
            return int(logits.argmax())
        # Accepts the token, too.
        return int(llama.llama_sampler_sample(self._chain, context, -1))

    def close(self) -> None:
        """Free the chain."""
        if self._chain is not None:
            llama.llama_sampler_free(self._chain)
            self._chain = None

    def _stages(self) -> list[Any]:
        part = self.part
        stages = []
        if part.top_k:
            stages.append(llama.llama_sampler_init_top_k(part.top_k))
        if part.top_p < 1:
            stages.append(llama.llama_sampler_init_top_p(part.top_p, 1))
        if part.min_p > 0:
            stages.append(llama.llama_sampler_init_min_p(part.min_p, 1))
        stages.append(llama.llama_sampler_init_temp(part.temp))
        stages.append(llama.llama_sampler_init_dist(part.seed))
        return stages
