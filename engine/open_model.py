"""An opened model: everything native that belongs to it, and what streams its experts."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

from engine import ggml
from engine.counters import Allocate, ExpertCounters
from engine.errors import GraphChanged, GraphError
from engine.expert_store import ExpertStore
from engine.experts import ExpertLayer, expert_layers
from engine.ggml import AbortFlag, ThreadPool, llama
from engine.graph import GraphPlan, learn
from engine.guessing import Guesser, model_guesser
from engine.hook import EvalHook, GraphCapture
from engine.lanes import Lanes
from engine.mapping import ShardMapping
from engine.model_file import ModelFile
from engine.routing import ExpertRouter
from engine.sizing import batch_that_fits

_ABORTED = 2


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
    row_bytes: int = 0
    """Of those, what stays in the file because only rows of it are read."""
    kv_bytes: int | None = None
    """Memory of the context's keys, values and states; None: llama.cpp did not say."""
    load_s: float = 0.0
    cache_reason: str = ""
    """Why an automatic cache has its size."""
    notes: list[str] = field(default_factory=list)
    """What a person should know now; always the same list."""
    reading_notes: list[str] = field(default_factory=list)
    """Of those, what was asked of reading and is not possible."""

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
        # It knows the way through the graph that was.
        self.router.compiled.close()
        self.router.plan = self.router.loader.plan = self.plan
        if self.guesser is not None:
            guesses = self.router.guesser is self.guesser
            self.guesser = model_guesser(self.plan, self.file, self.mappings)
            self.router.guesser = self.guesser if guesses else None
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
        if self.router is not None:
            self.router.compiled.close()
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
