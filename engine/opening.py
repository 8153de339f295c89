"""Opening a model: load, learn its graph, place its dense weights, size the cache.

The result, `OpenModel`, owns everything native; `Session` runs tokens through it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from engine import ggml, machine
from engine.config import AUTO, RunConfig
from engine.counters import (
    Allocate,
    ExpertCounters,
    GuessCounters,
    LaneCounters,
    RoutingCounters,
    private,
)
from engine.dense import dense_ranges, place_dense_weights
from engine.errors import GraphChanged, GraphError, InputError, ModelError
from engine.expert_store import ExpertStore, MappedExperts
from engine.experts import ExpertLayer, expert_layers
from engine.ggml import AbortFlag, ThreadPool, llama
from engine.graph import GraphPlan, learn
from engine.guessing import Guesser, model_guesser
from engine.hook import EvalHook, GraphCapture
from engine.lanes import Lanes
from engine.loading import ExpertLoader
from engine.mapping import ShardMapping, capture_log, load_model, pages_can_move
from engine.model_file import ModelFile
from engine.prefetch_trial import PrefetchTrial
from engine.residency import ExpertCache, NoCache
from engine.routing import ExpertRouter
from engine.sizing import (
    LARGEST_BATCH,
    batch_that_fits,
    choose_cache,
    cold_rule,
    default_threads,
    lossy_notes,
    mappings_needed,
)

_ABORTED = 2
Progress = Callable[[str, float], None]


@dataclass
class OpenModel:
    """A loaded model, its context, and what streams its experts."""

    file: ModelFile
    model: Any
    context: Any
    hook: EvalHook
    abort: AbortFlag
    allocate: Allocate
    """Where the live counters come from."""
    pool: ThreadPool
    n_threads: int
    top_k: int
    """Experts per token as opened."""
    batch: int
    """Prompt tokens per decode, so that a layer's experts fit the cache."""
    plan: GraphPlan | None = None
    layers: list[ExpertLayer] = field(default_factory=list)
    mappings: list[ShardMapping] = field(default_factory=list)
    lanes: Lanes | None = None
    expert_counters: ExpertCounters | None = None
    router: ExpertRouter | None = None
    guesser: Guesser | None = None
    moves_pages: bool = False
    """Whether a read may take over the memory of what was evicted for it."""
    dense_bytes: int = 0
    kv_bytes: int | None = None
    """Memory of the context's keys, values and states; None: llama.cpp did not say."""
    load_s: float = 0.0
    cache_reason: str = ""
    """Why an automatic cache has its size."""
    notes: list[str] = field(default_factory=list)

    @property
    def streams(self) -> bool:
        """Whether experts are streamed; otherwise llama.cpp runs it plainly."""
        return bool(self.mappings)

    @property
    def store(self) -> ExpertStore:
        """Where the experts are, of a model that streams."""
        assert self.router is not None
        return self.router.store

    @property
    def n_ctx(self) -> int:
        """Tokens that the context holds."""
        return int(llama.llama_n_ctx(self.context))

    def fit_batch(self, budget_bytes: int) -> None:
        """Choose the batch for a cache budget; a small context takes no larger one than itself."""
        fitting = batch_that_fits(self.layers, self.top_k, budget_bytes)
        self.batch = min(fitting, int(llama.llama_n_batch(self.context)))

    def learn_graph(self) -> None:
        """Capture the graph of one token and find the experts in it.

        Raises GraphError where nothing routed is found.
        """
        capture = GraphCapture()
        self.hook.record(capture)
        self.abort.set()
        try:
            token = ctypes.c_int32(0)
            status = llama.llama_decode(
                self.context, llama.llama_batch_get_one(ctypes.pointer(token), 1)
            )
        finally:
            self.abort.clear()
            self.hook.record(None)
        if status != _ABORTED:
            raise GraphError(
                f"llama.cpp did not stop a graph when told to (it returned {status}); "
                "install the version that pyproject.toml pins"
            )
        weights = {
            address: name for address, name in capture.leaves.items() if name in self.file.tensors
        }
        self.plan = learn(capture.nodes, weights)
        if not self.plan.layers:
            raise GraphError(f"{self.file.paths[0]}: no routed experts in its graph")
        self.layers = expert_layers(self.plan, self.file)
        self._prove_addresses(capture, weights)

    def learn_again(self) -> None:
        """After a graph that did not look as learned. Raises GraphChanged if the experts moved."""
        assert self.router is not None
        before = self.layers
        self.learn_graph()
        if self.layers != before:
            raise GraphChanged("the model computes with other experts than it was opened with")
        assert self.plan is not None
        self.router.plan = self.plan
        self.hook.install(self.router)

    def _prove_addresses(self, capture: GraphCapture, weights: dict[int, str]) -> None:
        """Every weight must lie in the mapping at its file offset (repacking would move it)."""
        if not self.mappings:
            return
        for address, name in weights.items():
            entry = self.file.tensors[name]
            expected = self.mappings[entry.shard].base + entry.offset
            if capture.weight_address(address) != expected:
                raise ggml.AbiMismatch(
                    f"llama.cpp does not compute with {name} where the file is mapped "
                    "(is repacking on?); the engine cannot stream this build"
                )

    def close(self) -> None:
        """Free everything, in the order in which it depends on each other."""
        if self.lanes is not None:
            self.lanes.close()
        if self.context is not None:
            self.pool.close(self.context)
            llama.llama_free(self.context)
            self.context = None
        if self.model is not None:
            llama.llama_model_free(self.model)
            self.model = None
        if self.router is not None:
            self.router.store.close()


def open_model(
    config: RunConfig,
    progress: Progress | None = None,
    *,
    poison: bool = False,
    observe: bool = False,
    allocate: Allocate = private,
) -> OpenModel:
    """Open the model that `config` names, ready for its first token.

    With `observe`, routings of a model that is not streamed can be watched and forced, too.
    Raises ModelError for a file that cannot be used, InputError for settings that do not suit it,
    AbiMismatch or GraphError if this llama.cpp is not one that the engine knows.
    """
    started = perf_counter()
    report = progress or (lambda _stage, _fraction: None)
    ggml.check_abi()
    file = ModelFile.open(config.model.path)
    _check_fits_model(config, file)
    report("loading", 0.0)
    opened = _load(config, file, allocate, hooked=config.stream.enabled or observe)
    try:
        if config.stream.enabled:
            _start_streaming(opened, config, report, poison)
        else:
            if config.routing.drop_cold_experts:
                opened.notes.append(
                    "drop-cold-experts has no effect without streaming: nothing is dropped"
                )
            if observe:
                _start_observing(opened)
        opened.load_s = perf_counter() - started
        return opened
    except BaseException:
        opened.close()
        raise


def _check_fits_model(config: RunConfig, file: ModelFile) -> None:
    layout = file.experts
    if config.stream.enabled and not layout.entry_bytes:
        raise ModelError(
            f"{file.paths[0]}: is a dense model ({file.arch}): it has no experts, so there is "
            "nothing to stream. Run it as it is with --no-stream (stream.enabled = false)"
        )
    wanted = config.routing.n_expert_used
    if wanted > layout.n_expert > 0:
        raise InputError(
            f"routing.n-expert-used = {wanted}: the model has {layout.n_expert} experts per layer "
            f"and routes to {layout.n_expert_used}"
        )


def _load(config: RunConfig, file: ModelFile, allocate: Allocate, *, hooked: bool) -> OpenModel:
    n_threads = default_threads() if config.model.threads == AUTO else int(config.model.threads)
    params = llama.llama_model_default_params()
    params.n_gpu_layers = 0
    overrides = _kv_overrides(file, config.routing.n_expert_used)
    if overrides is not None:
        params.kv_overrides = overrides
    mappings: list[ShardMapping] = []
    if config.stream.enabled:
        model, mappings = load_model(file, params)
    else:
        model = _load_plainly(file, params)
    abort, pool = AbortFlag(), ThreadPool(n_threads)
    hook = EvalHook(abort)
    with capture_log() as log:
        context = _new_context(config, model, hook if hooked else None, abort, n_threads)
    if not context:
        llama.llama_model_free(model)
        pool.close(None)
        raise ModelError(
            f"{file.paths[0]}: llama.cpp cannot make a context of {config.model.ctx} tokens; "
            "a smaller model.ctx needs less memory"
        )
    pool.attach(context)
    return OpenModel(
        file,
        model,
        context,
        hook,
        abort,
        allocate,
        pool,
        n_threads,
        config.routing.n_expert_used or file.experts.n_expert_used,
        int(llama.llama_n_batch(context)),
        mappings=mappings,
        kv_bytes=log.state_bytes(),
    )


def _load_plainly(file: ModelFile, params: Any) -> Any:
    params.use_extra_bufts = False
    with capture_log() as log:
        model = llama.llama_model_load_from_file(os.fsencode(file.paths[0]), params)
        if not model:
            raise ModelError(f"{file.paths[0]}: llama.cpp cannot load it: {log.reason()}")
    return model


def _kv_overrides(file: ModelFile, n_expert_used: int) -> Any:
    if not n_expert_used:
        return None
    # Ends with an empty key, as llama.cpp wants it.
    overrides: Any = (llama.llama_model_kv_override * 2)()
    overrides[0].tag = llama.LLAMA_KV_OVERRIDE_TYPE_INT
    overrides[0].key = f"{file.arch}.expert_used_count".encode()
    overrides[0].value.val_i64 = n_expert_used
    return overrides


def _new_context(
    config: RunConfig, model: Any, hook: EvalHook | None, abort: AbortFlag, n_threads: int
) -> Any:
    params = llama.llama_context_default_params()
    params.n_ctx = config.model.ctx
    # One graph per decode: llama.cpp would otherwise split a batch behind our back.
    params.n_batch = params.n_ubatch = config.model.batch or LARGEST_BATCH
    params.n_outputs_max = 1
    params.n_threads = params.n_threads_batch = n_threads
    params.offload_kqv = False
    params.op_offload = False
    params.no_perf = True
    params.abort_callback = abort.function
    params.abort_callback_data = abort.argument
    if hook is not None:
        params.cb_eval = hook.function
    return llama.llama_init_from_model(model, params)


def _start_streaming(opened: OpenModel, config: RunConfig, report: Progress, poison: bool) -> None:
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
    weights = [opened.file.tensors[name] for name in opened.plan.dense_weights]
    ranges = dense_ranges(weights, opened.layers, len(opened.mappings))
    place_dense_weights(
        stream.dense_weights,
        opened.file,
        ranges,
        opened.mappings,
        opened.lanes,
        lambda fraction: report("reading dense weights", fraction),
    )
    opened.dense_bytes = sum(weight.nbytes for weight in weights)
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
    router.rule = cold_rule(config)
    opened.notes += lossy_notes(router.rule, opened.top_k)
    opened.router = router
    opened.guesser = model_guesser(opened.plan, opened.file, opened.mappings)
    opened.notes += read_as_asked(opened, config)
    if not config.model.batch:
        opened.fit_batch(budget)
    opened.hook.install(router)


def read_as_asked(opened: OpenModel, config: RunConfig) -> list[str]:
    """Overlap reads with compute as far as the settings ask for and the model allows.

    Returns what was asked for and is not possible.
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
    router.guesser = guesser if guesser and guesser.n_guessable and lanes.count > 1 else None
    router.trial = PrefetchTrial() if config.stream.prefetch == AUTO else None
    if config.stream.prefetch == "on" and router.guesser is None:
        reason = (
            "the way in which this model's router ranks experts is not understood"
            if lanes.count > 1
            else "it needs a second I/O lane (stream.io-threads)"
        )
        notes.append(f"prefetch is off: {reason}")
    return notes


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


def _start_observing(opened: OpenModel) -> None:
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
