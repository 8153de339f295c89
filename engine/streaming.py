"""Starting to stream an opened model: its graph, its dense weights, its cache, its router."""

from __future__ import annotations

from collections.abc import Callable

from engine import machine, native_library
from engine.config import AUTO, RunConfig
from engine.counters import ExpertCounters, GuessCounters, LaneCounters, RoutingCounters
from engine.dense import bring_dense_weights
from engine.expert_store import ExpertStore, MappedExperts
from engine.guessing import model_guesser
from engine.lanes import Lanes
from engine.loading import ExpertLoader
from engine.mapping import pages_can_move
from engine.no_cache import NoCache
from engine.open_model import OpenModel
from engine.prefetch_trial import PrefetchTrial
from engine.residency import ExpertCache
from engine.routing import ExpertRouter
from engine.sizing import choose_cache, cold_rule, lossy_notes, mappings_needed

Progress = Callable[[str, float], None]


def start_streaming(opened: OpenModel, config: RunConfig, report: Progress, poison: bool) -> None:
    """Learn the graph, bring the dense weights in, and put cache and router in place."""
    stream = config.stream
    report("learning the graph", 0.0)
    opened.learn_graph()
    assert opened.plan is not None
    opened.lanes = Lanes(
        opened.mappings,
        stream.io_threads,
        o_direct=stream.o_direct,
        counters=LaneCounters(opened.allocate),
    )
    if stream.o_direct and not opened.lanes.o_direct:
        opened.notes.append(
            "O_DIRECT is not possible on this filesystem: reading through the page cache"
        )
    _see_whether_pages_move(opened)
    if native_library.library is None:
        opened.notes.append(
            f"experts are loaded in Python, some of the speed is lost: {native_library.reason} "
            "(tuiwork doctor)"
        )
    opened.dense_bytes, opened.row_bytes = bring_dense_weights(
        stream.dense_weights,
        opened.plan,
        opened.file,
        opened.layers,
        opened.mappings,
        opened.lanes,
        lambda fraction: report("reading dense weights", fraction),
    )
    choice = choose_cache(config, opened.layers, opened.top_k)
    budget, opened.cache_reason = choice.budget_bytes, choice.reason
    if choice.warning:
        opened.notes.append(choice.warning)
    opened.expert_counters = ExpertCounters(
        len(opened.layers), max(layer.n_expert for layer in opened.layers), opened.allocate
    )
    router = ExpertRouter(
        opened.plan,
        ExpertLoader(
            opened.plan,
            new_store(opened, budget, poison=poison),
            opened.lanes,
            GuessCounters(len(opened.layers), opened.allocate),
        ),
        RoutingCounters(len(opened.layers), opened.allocate),
        opened.top_k,
    )
    router.compiled.on_refusal = opened.notes.append
    router.rule = cold_rule(config)
    opened.notes += lossy_notes(router.rule, opened.top_k)
    opened.router = router
    opened.guesser = model_guesser(opened.plan, opened.file, opened.mappings)
    read_as_asked(opened, config)
    if not config.model.batch:
        opened.fit_batch(budget)
    opened.hook.install(router)


def read_as_asked(opened: OpenModel, config: RunConfig) -> None:
    """Overlap reads with compute as far as the settings ask for and the model allows.

    The model's notes say what was asked for and is not possible.
    """
    router, plan, lanes = opened.router, opened.plan, opened.lanes
    assert router is not None and plan is not None and lanes is not None
    notes = []
    named = all(layer.users_are_named for layer in plan.layers)
    router.loader.overlap = config.stream.overlap != "off" and named
    if config.stream.overlap == "on" and not named:
        notes.append(
            "overlap is off: this model's graph has no names for the nodes that use its experts"
        )
    guesser = opened.guesser if config.stream.prefetch != "off" else None
    understood = guesser is not None and guesser.n_guessable > 0
    has_room = lanes.count > 1 and opened.store.budget_bytes > 0
    router.guesser = guesser if understood and has_room else None
    router.trial = PrefetchTrial() if config.stream.prefetch == AUTO else None
    # What is in memory decides what is left out.
    router.loader.ahead.steady = router.trial is not None and cold_rule(config) is not None
    if config.stream.prefetch == "on" and router.guesser is None:
        reason = "the way in which this model's router ranks experts is not understood"
        if understood:
            reason = "it needs a second I/O lane (stream.io-threads) and a cache"
        notes.append(f"prefetch is off: {reason}")
    others = [note for note in opened.notes if note not in opened.reading_notes]
    opened.notes[:], opened.reading_notes = others + notes, notes


def _see_whether_pages_move(opened: OpenModel) -> None:
    wanted = mappings_needed(opened.layers)
    can_move = pages_can_move()
    opened.moves_pages = can_move and wanted <= machine.max_mappings()
    if not can_move:
        opened.notes.append(
            "this kernel cannot move memory between experts (Linux 5.7 can): evicted memory is "
            "freed and taken anew, which reads slower"
        )
    elif not opened.moves_pages:
        opened.notes.append(
            f"vm.max_map_count = {machine.max_mappings()} is too low to move memory between this "
            f"model's experts: evicted memory is freed and taken anew, which reads slower. "
            f"sysctl vm.max_map_count={wanted} lifts that"
        )


def start_observing(opened: OpenModel) -> None:
    """Let the routings of a model that is not streamed be watched and forced."""
    opened.learn_graph()
    assert opened.plan is not None
    opened.router = ExpertRouter(
        opened.plan,
        ExpertLoader(
            opened.plan,
            MappedExperts(opened.layers, []),
            Lanes([], 1),
            GuessCounters(len(opened.layers)),
        ),
        RoutingCounters(len(opened.layers), opened.allocate),
        opened.top_k,
    )
    opened.hook.install(opened.router)


def new_store(opened: OpenModel, budget_bytes: int, *, poison: bool = False) -> ExpertStore:
    """The expert store for a budget; 0 is no cache."""
    if budget_bytes == 0:
        return NoCache(
            opened.layers, opened.mappings, counters=opened.expert_counters, poison=poison
        )
    return ExpertCache(
        opened.layers,
        opened.mappings,
        budget_bytes,
        counters=opened.expert_counters,
        poison=poison,
        moves_pages=opened.moves_pages,
    )
