"""What the engine relies on in llama.cpp, pinned: an update that breaks it fails here, by name."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest

from engine import ggml
from engine.config import RunConfig
from engine.ggml import Tensor, llama
from engine.mapping import load_model
from engine.model_file import ModelFile
from engine.node_values import matrix_at
from engine.open_model import OpenModel
from engine.opening import open_model

TinyModel = Callable[..., Path]
TASKS = Path("/proc/self/task")


@dataclass
class Spy:
    """A callback that writes down what it is called for, and may act on marked nodes."""

    marked: tuple[str, ...] = ()
    act: Callable[[str, Tensor], None] | None = None
    events: list[tuple[str, str]] = field(default_factory=list)

    def __call__(self, address: int, ask: bool, _data: Any) -> bool:
        name = Tensor.from_address(address).name.decode()
        if ask:
            self.events.append(("ask", name))
            # Views that llama.cpp makes carry their source's name and a remark in brackets.
            return bool(self.marked) and name.startswith(self.marked) and "(" not in name
        self.events.append(("visit", name))
        if self.act is not None:
            self.act(name, Tensor.from_address(address))
        return True

    def names(self, kind: str) -> list[str]:
        return [name for event, name in self.events if event == kind]


@contextmanager
def spied_context(path: Path, spy: Spy, abort: ggml.AbortFlag | None = None) -> Iterator[Any]:
    """A plain llama.cpp context on our mapping, with `spy` as its callback."""
    params = llama.llama_model_default_params()
    params.n_gpu_layers = 0
    model, _ = load_model(ModelFile.open(path), params)
    callback = llama.ggml_backend_sched_eval_callback(spy)
    settings = llama.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch = 256, 64, 64
    settings.n_threads = settings.n_threads_batch = 1
    settings.cb_eval = callback
    if abort is not None:
        settings.abort_callback, settings.abort_callback_data = abort.function, abort.argument
    context = llama.llama_init_from_model(model, settings)
    try:
        yield context
    finally:
        llama.llama_free(context)
        llama.llama_model_free(model)


def decode(context: Any, tokens: list[int]) -> int:
    array = (ctypes.c_int32 * len(tokens))(*tokens)
    return int(llama.llama_decode(context, llama.llama_batch_get_one(array, len(tokens))))


def test_structs_are_where_we_think() -> None:
    ggml.check_abi()


def test_a_wrong_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shifted(ctypes.Structure):
        _fields_ = [("unknown", ctypes.c_int64), *Tensor._fields_]

    monkeypatch.setattr(ggml, "Tensor", Shifted)
    with pytest.raises(ggml.AbiMismatch, match=r"ggml_tensor\.\w+ is not where"):
        ggml.check_abi()


def test_a_wrong_layout_of_a_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shifted(ctypes.Structure):
        _fields_ = [("unknown", ctypes.c_int64), *ggml.ComputePlan._fields_]

    monkeypatch.setattr(ggml.plan_graph, "restype", Shifted)
    with pytest.raises(ggml.AbiMismatch, match="ggml_cplan has another layout"):
        ggml.check_abi()


def test_a_marked_node_is_visited_before_anything_behind_it_is_asked(
    tiny_model: TinyModel,
) -> None:
    spy = Spy(("ffn_moe_topk",))
    with spied_context(tiny_model("tiny"), spy) as context:
        assert decode(context, [5, 6, 7]) == 0
    marked = [i for i, (kind, name) in enumerate(spy.events) if name.startswith("ffn_moe_topk")]
    assert len(marked) == 2 * 5  # asked and visited, in five layers
    for ask, visit in zip(marked[::2], marked[1::2], strict=True):
        assert spy.events[ask][0] == "ask"
        assert spy.events[visit] == ("visit", spy.events[ask][1])
        assert visit == ask + 1


def test_a_marked_node_is_computed_and_what_depends_on_it_is_not(tiny_model: TinyModel) -> None:
    """Ids that are changed when the routing is visited are the ids that everything behind uses."""
    chosen: dict[str, np.ndarray] = {}
    probabilities: dict[str, np.ndarray] = {}

    def check(name: str, tensor: Tensor) -> None:
        layer = name.rpartition("-")[2]
        if name.startswith("ffn_moe_probs-"):
            probabilities[layer] = matrix_at(tensor, ctypes.c_float).copy()
        elif name.startswith("ffn_moe_topk-"):
            ids = matrix_at(tensor, ctypes.c_int32)
            ranked = np.argsort(-probabilities[layer], axis=1, kind="stable")[:, : ids.shape[1]]
            assert np.array_equal(ids, ranked), "the routing was not computed when visited"
            ids[...] = (ids + 1) % probabilities[layer].shape[1]
            chosen[layer] = ids.copy()
        elif name.startswith("ffn_moe_weights-"):
            gathered = matrix_at(tensor, ctypes.c_float, rows=2, columns=1)
            expected = np.take_along_axis(probabilities[layer], chosen[layer], axis=1)
            assert np.array_equal(gathered, expected), "a dependent had run before the visit"

    failures: list[BaseException] = []

    def act(name: str, tensor: Tensor) -> None:
        try:
            check(name, tensor)
        except BaseException as failure:
            failures.append(failure)

    spy = Spy(("ffn_moe_probs-", "ffn_moe_topk-", "ffn_moe_weights-"), act)
    with spied_context(tiny_model("tiny"), spy) as context:
        assert decode(context, [5, 6, 7, 8]) == 0
        assert decode(context, [9]) == 0
    assert not failures, failures[0]
    assert len(chosen) == 5


def test_every_decode_is_asked_in_full_also_when_the_graph_is_reused(
    tiny_model: TinyModel,
) -> None:
    spy = Spy()
    with spied_context(tiny_model("tiny"), spy) as context:
        decode(context, [5])
        per_decode = []
        for token in range(6, 16):
            spy.events.clear()
            assert decode(context, [token]) == 0
            per_decode.append(spy.names("ask"))
    assert all(names == per_decode[0] for names in per_decode)
    assert sum(name.startswith("ffn_moe_topk") for name in per_decode[0]) == 5


def test_the_abort_flag_stops_a_graph_and_takes_the_batch_back(tiny_model: TinyModel) -> None:
    abort, spy = ggml.AbortFlag(), Spy()
    with spied_context(tiny_model("tiny"), spy, abort) as context:
        memory = llama.llama_get_memory(context)
        assert decode(context, [5, 6]) == 0
        abort.set()
        assert decode(context, [7]) == 2
        assert llama.llama_memory_seq_pos_max(memory, 0) == 1
        abort.clear()
        assert decode(context, [7]) == 0
        assert llama.llama_memory_seq_pos_max(memory, 0) == 2


def test_loading_reads_only_the_header(tiny_model: TinyModel) -> None:
    """The stand-in is cut before it is mapped; else `load_model` refuses."""
    file = ModelFile.open(tiny_model("tiny"))
    params = llama.llama_model_default_params()
    params.n_gpu_layers = 0
    model, mappings = load_model(file, params)
    try:
        entry = file.tensors["output_norm.weight"]
        start = mappings[0].base + entry.offset
        mapped = ctypes.string_at(start, entry.nbytes)
        assert mapped == file.paths[0].read_bytes()[entry.offset : entry.offset + entry.nbytes]
    finally:
        llama.llama_model_free(model)


@contextmanager
def opened(path: Path) -> Iterator[OpenModel]:
    config = RunConfig().replace({"model.path": str(path), "model.ctx": 256, "model.threads": 1})
    model = open_model(config)
    try:
        yield model
    finally:
        model.close()


@dataclass(frozen=True)
class Layout:
    """What must be learned of a kind's first routed layer."""

    n_layers: int
    first: int
    banks: tuple[str, ...]
    final_weights: str
    softmax_after: bool = False


SPLIT = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
FUSED = ("ffn_gate_up_exps", "ffn_down_exps")
LAYOUTS = {
    "tiny": Layout(5, 0, SPLIT, "ffn_moe_weights_norm"),
    "tiny-mixed": Layout(6, 0, SPLIT, "ffn_moe_weights_norm"),
    "tiny-split": Layout(5, 0, SPLIT, "ffn_moe_weights_norm"),
    "tiny-fused": Layout(4, 1, FUSED, "ffn_moe_weights"),
    "tiny-biased": Layout(5, 0, SPLIT, "ffn_moe_weights_softmax", softmax_after=True),
    "tiny-sigmoid": Layout(4, 1, SPLIT, "ffn_moe_weights_scaled"),
    "tiny-hybrid": Layout(4, 0, SPLIT, "ffn_moe_weights_norm"),
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_graph_is_learned(kind: str, tiny_model: TinyModel) -> None:
    """Names, layouts and weights nodes as this version builds them. Repacking would move banks."""
    expected = LAYOUTS[kind]
    with opened(tiny_model(kind)) as model:
        assert model.plan is not None
        layers = model.plan.layers
        assert len(layers) == expected.n_layers
        assert [layer.number for layer in layers] == list(
            range(expected.first, expected.first + expected.n_layers)
        )
        for layer in layers:
            names = {f"blk.{layer.number}.{bank}.weight" for bank in expected.banks}
            assert set(layer.banks) == names
            assert layer.routing == f"ffn_moe_topk-{layer.number}"
            assert layer.ranking == f"ffn_moe_argsort-{layer.number}"
            assert layer.raw_weights == f"ffn_moe_weights-{layer.number}"
            assert _without_view(layer.final_weights) == f"{expected.final_weights}-{layer.number}"
            assert layer.softmax_after is expected.softmax_after
            assert layer.probabilities is not None
        banks = {bank for layer in layers for bank in layer.banks}
        dense, rows = set(model.plan.dense_weights), set(model.plan.row_weights)
        assert not banks & dense and not (banks | dense) & rows
        assert banks | dense | rows == set(model.file.tensors)
        tied = "output.weight" not in model.file.tensors
        assert rows == (set() if tied else {"token_embd.weight"})


def _without_view(name: str | None) -> str | None:
    return name.partition(" (")[0] if name else None


def affinities() -> dict[int, set[int]]:
    """Where each thread of this process may run."""
    return {int(task.name): os.sched_getaffinity(int(task.name)) for task in TASKS.iterdir()}


class TestThreadPool:
    """Compute threads are bound to a core each, and nobody else is."""

    def test_a_thread_for_every_core_has_its_own(self) -> None:
        cores = os.sched_getaffinity(0)
        if len(cores) < 2 or ggml.uses_openmp():
            pytest.skip("one core, or a build with OpenMP")
        before = affinities()
        pool = ggml.ThreadPool(len(cores))
        try:
            workers = {task: on for task, on in affinities().items() if task not in before}
            assert len(workers) == len(cores) - 1
            # A worker binds itself as the first thing it does, whenever it comes to run.
            for _ in range(200):
                if all(len(on) == 1 for on in workers.values()):
                    break
                sleep(0.05)
                workers = {task: affinities()[task] for task in workers}
            assert affinities().items() >= before.items()
            with pool.computing():
                own = os.sched_getaffinity(0)
                assert sorted([*own, *(core for on in workers.values() for core in on)]) == sorted(
                    cores
                )
            assert os.sched_getaffinity(0) == cores
        finally:
            pool.close(None)

    def test_with_cores_to_spare_the_scheduler_chooses(self) -> None:
        cores = os.sched_getaffinity(0)
        pool = ggml.ThreadPool(1)
        with pool.computing():
            assert set(map(frozenset, affinities().values())) == {frozenset(cores)}
        pool.close(None)
