"""What streaming an opened model did so far, as plain values."""

from __future__ import annotations

from engine.open_model import OpenModel
from engine.results import LayerCounts, StreamCounts


def stream_counts(opened: OpenModel, reads: int, read_bytes: int) -> StreamCounts | None:
    """The whole of it, with what the tokens read; None where nothing is streamed."""
    router = opened.router
    if router is None or not opened.streams:
        return None
    counters, warming = router.counters, router.loader.warming
    router.loader.collect()
    return StreamCounts(
        reads=reads,
        hits=router.store.hits,
        misses=router.store.misses,
        evictions=router.store.evictions,
        routed=int(counters.routed.sum()),
        examined=int(counters.examined.sum()),
        dropped=int(counters.dropped.sum()),
        substituted=int(counters.substituted.sum()),
        mass_discarded=int(counters.mass_discarded_ppb.sum()) / 1e9,
        bytes=read_bytes,
        resident_bytes=router.store.resident_bytes,
        warmed=warming.n_warmed if warming else 0,
        warmed_used=warming.n_used if warming else 0,
        warmed_bytes=warming.read_bytes if warming else 0,
    )


def layer_counts(opened: OpenModel) -> list[LayerCounts]:
    """What became of routed experts, by layer; empty where nothing is streamed."""
    router = opened.router
    if router is None or not opened.streams:
        return []
    counters, experts = router.counters, router.store.counters
    return [
        LayerCounts(
            layer=layer.number,
            routed=int(counters.routed[index]),
            hits=int(experts.hits[index].sum()),
            misses=int(experts.misses[index].sum()),
            dropped=int(counters.dropped[index]),
            substituted=int(counters.substituted[index]),
            mass_discarded=int(counters.mass_discarded_ppb[index]) / 1e9,
        )
        for index, layer in enumerate(opened.layers)
    ]
