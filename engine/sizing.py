"""What the settings mean here and now: the cache's size, the batch, the threads, the lossy rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine import machine
from engine.config import AUTO, RunConfig
from engine.experts import ExpertLayer
from engine.policy import TOP_K_THAT_WARNS, ColdRule
from engine.pressure import Bounds, floor_bytes
from engine.telemetry import MIB

LARGEST_BATCH = 512
"""Prompt tokens per decode where memory does not limit them."""


def default_threads() -> int:
    """One compute thread per physical core, no more than a container's quota allows."""
    quota = machine.cpu_quota()
    cores = machine.physical_cores()
    return max(1, min(cores, round(quota))) if quota else cores


def cold_rule(config: RunConfig) -> ColdRule | None:
    """The lossy rule that the configuration asks for, or None: lossless."""
    routing = config.routing
    if routing.drop_cold_experts <= 0:
        return None
    return ColdRule(
        routing.drop_cold_experts,
        routing.cold_policy == "substitute",
        routing.drop_renorm,
        routing.drop_in_prefill,
    )


def lossy_notes(rule: ColdRule | None, top_k: int) -> list[str]:
    """What a person should know of a lossy rule on this model."""
    if rule is None or top_k > TOP_K_THAT_WARNS:
        return []
    return [
        f"lossy: with only {top_k} experts per token, drop-cold-experts = {rule.frac:g} leaves out "
        f"experts of up to {100 * rule.threshold(top_k):.3g} % of a routing; "
        "each of so few carries much of the answer"
    ]


@dataclass(frozen=True)
class CacheChoice:
    """How large the cache is, and why."""

    budget_bytes: int
    reason: str
    """In words; empty where the size was asked for."""
    warning: str
    """What to change about the size that was asked for; empty: nothing."""


def choose_cache(
    config: RunConfig, layers: Sequence[ExpertLayer], top_k: int, taken_bytes: int = 0
) -> CacheChoice:
    """What `stream.cache-mb` means here and now, where a cache has `taken_bytes` already."""
    demand = token_demand_bytes(layers, top_k)
    stream = config.stream
    if stream.cache_mb != AUTO:
        budget = int(stream.cache_mb) * MIB
        if not 0 < budget < demand:
            return CacheChoice(budget, "", "")
        return CacheChoice(
            budget,
            "",
            f"a token of this model routes to {demand / MIB:.0f} MiB of experts, more than the "
            f"cache of {stream.cache_mb} MiB: hits will be few. Set stream.cache-mb to "
            f"{-(-demand // MIB)} or more, or to 0",
        )
    here = machine.memory()
    bounds = auto_bounds(config, layers, top_k, here.total_bytes)
    budget = bounds.fitting(taken_bytes, here.available_bytes)
    all_experts = all_experts_bytes(layers)
    if budget == all_experts:
        return CacheChoice(budget, "all experts fit", "")
    available, floor = (taken_bytes + here.available_bytes) // MIB, bounds.floor // MIB
    reason = f"{available} MiB available, {floor} left to the system"
    if budget == demand:
        reason += ", but at least one token's demand"
    elif budget == bounds.most:
        reason = "cache-ceil-mb"
    return CacheChoice(budget, f"of {all_experts // MIB}: {reason}", "")


def auto_bounds(
    config: RunConfig, layers: Sequence[ExpertLayer], top_k: int, total_bytes: int
) -> Bounds:
    """What an automatic cache keeps to where there are `total_bytes` of memory in all."""
    stream, most = config.stream, all_experts_bytes(layers)
    if stream.cache_ceil_mb:
        most = min(most, stream.cache_ceil_mb * MIB)
    floor = floor_bytes(stream.cache_floor_mb, total_bytes)
    return Bounds(floor, token_demand_bytes(layers, top_k), most)


def all_experts_bytes(layers: Sequence[ExpertLayer]) -> int:
    """What every expert of a model weighs."""
    return sum(layer.entry_bytes * layer.n_expert for layer in layers)


def mappings_needed(layers: Sequence[ExpertLayer]) -> int:
    """How many memory mappings moving pages between slices may take.

    Moved pages cannot be merged with their neighbours, so in the worst case every slice and every
    gap between two becomes a mapping of its own. The last term is for the whole process.
    """
    banks = [bank for layer in layers for bank in layer.banks]
    return sum(2 * bank.n_expert + 2 for bank in banks) + 4096


def token_demand_bytes(layers: Sequence[ExpertLayer], top_k: int) -> int:
    """Expert bytes that one token routes to."""
    return sum(layer.entry_bytes * min(top_k, layer.n_expert) for layer in layers)


def batch_that_fits(layers: Sequence[ExpertLayer], top_k: int, budget_bytes: int) -> int:
    """The largest prefill batch whose experts of one layer fit the budget whatever it routes to.

    Without a cache the layers share memory of one whole layer, so any batch fits.
    """
    if budget_bytes == 0:
        return LARGEST_BATCH
    widest = max(layers, key=lambda layer: layer.entry_bytes * layer.n_expert)
    fitting = budget_bytes // widest.entry_bytes
    if fitting >= widest.n_expert:
        return LARGEST_BATCH
    return int(max(1, min(LARGEST_BATCH, fitting // max(1, top_k))))
