"""What a session tells about itself: the opened model, its layers, and an answer.

Plain values without llama.cpp, so that the app's process can hold what the engine's process sends.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelInfo:
    """What an opened model is, for people and files. Sizes in bytes."""

    path: str
    name: str
    arch: str
    n_layer: int
    n_expert: int
    n_expert_used: int
    ctx: int
    n_vocab: int
    token_demand_bytes: int
    layer_demand_bytes: int
    expert_bytes_total: int
    dense_bytes: int
    """Everything that is no expert."""
    has_chat_template: bool
    row_bytes: int = 0
    """Of dense_bytes, what stays in the file because only rows of it are read."""


@dataclass(frozen=True)
class LayerShape:
    """One routed layer. The n-th of them is row n of the live counters."""

    number: int
    """The block's number in the model (dense blocks are not in the counters)."""
    n_expert: int
    entry_bytes: int
    """One expert over all its banks."""


@dataclass(frozen=True)
class Answer:
    """What a generation gave."""

    text: str
    reasoning: str
    tokens: list[int]
    n_prompt: int
    n_reused: int
    """Prompt tokens that were in the context already."""
    n_generated: int
    tok_s: float | None
    """Generated tokens per second after the first; None if there was no second."""
    prefill_tok_s: float | None
    stop_reason: str
    """eos, stop, length, context or cancelled"""
    figures: dict[str, float] = field(default_factory=dict)
    """The summary of this turn's metrics."""


@dataclass(frozen=True)
class LayerCounts:
    """What became of one layer's routed experts since the model was opened."""

    layer: int
    routed: int
    hits: int
    misses: int
    dropped: int
    substituted: int
    mass_discarded: float
    """Router's shares of what was dropped or replaced, each routing being 1."""


@dataclass(frozen=True)
class StreamCounts:
    """What streaming did since the model was opened. Experts count as (token, layer, slot)."""

    reads: int
    """Reads of expert slices; an expert takes one per projection."""
    hits: int
    misses: int
    evictions: int
    routed: int
    examined: int
    """Routed experts that a lossy rule looked at."""
    dropped: int
    substituted: int
    mass_discarded: float
    """Router's shares of what was dropped or replaced, each routing being 1."""
    bytes: int
    resident_bytes: int = 0
    """Experts that are in memory now."""
    warmed: int = 0
    """Experts that a warm start read, which `reads` and `bytes` do not count."""
    warmed_used: int = 0
    """Of these, those that were routed to before they left the cache."""
    warmed_bytes: int = 0
