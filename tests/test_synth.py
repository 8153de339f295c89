"""Synthetic models: which shapes there are, what is refused, and that llama.cpp runs them."""

from __future__ import annotations

import collections
import ctypes
import errno
import hashlib
import os
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llama_cpp
import llama_cpp.llama_cpp as low_level
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import ggml, synth
from engine.errors import InputError
from engine.synth_parse import check_shape
from engine.synth_shapes import QUANTS
from engine.synth_tensors import plan_tensors

TinyModel = Callable[..., Path]
TINY = [name for name in synth.SHAPES if name.startswith("tiny")]
TINY_MOE = [name for name in TINY if synth.SHAPES[name].is_moe]
TEXT = "Hello there,\n\tcosta 12,50 € – naïve 🙂"


def banks_of(shape: str) -> dict[str, int]:
    """Bytes of every expert bank, by its name."""
    plans = plan_tensors(synth.shape_from_text(shape))
    return {plan.name: plan.n_bytes for plan in plans if plan.name.endswith("_exps.weight")}


def digests(paths: list[Path]) -> list[str]:
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]


def load(path: Path) -> llama_cpp.Llama:
    """The model, computing on one thread: a test session may have the other cores busy."""
    return llama_cpp.Llama(
        str(path), n_ctx=512, n_gpu_layers=0, n_threads=1, n_threads_batch=1, verbose=False
    )


def greedy(path: Path, n_tokens: int) -> tuple[list[int], Any]:
    """The tokens a model says, and its last logits."""
    llm = load(path)
    try:
        tokens: list[int] = []
        llm.eval(llm.tokenize(TEXT.encode()))
        while len(tokens) < n_tokens:
            tokens.append(llm.sample(temp=0.0))
            llm.eval(tokens[-1:])
        logits = np.ctypeslib.as_array(low_level.llama_get_logits(llm.ctx), (llm.n_vocab(),))
        return tokens, logits.copy()
    finally:
        llm.close()


class TestShapes:
    @pytest.mark.parametrize("name", synth.SHAPES)
    def test_every_named_shape_can_be_built_and_says_what_it_is_for(self, name: str) -> None:
        shape = synth.shape_from_text(name)
        check_shape(shape)
        assert shape.name == name
        assert shape.description

    def test_changes_are_applied(self) -> None:
        shape = synth.shape_from_text("tiny, n-layer = 6, n-expert=32,quant-down=Q8_0")
        assert (shape.n_layer, shape.n_expert, shape.quant_down) == (6, 32, "Q8_0")
        assert shape.n_embd == synth.SHAPES["tiny"].n_embd
        assert shape.name == "tiny,n-layer = 6,n-expert=32,quant-down=Q8_0"

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("tinny", "did you mean 'tiny'?"),
            ("qwen3-30b", "did you mean 'qwen3-30b-a3b'?"),
            ("", "Shapes: tiny,"),
            ("tiny,n-layers=3", "did you mean 'n-layer'?"),
            ("tiny,n-layer", "write key=value"),
            ("tiny,", "write key=value"),
            ("tiny,n-layer=six", "n-layer is a whole number"),
            ("tiny,expert-scale=x", "expert-scale is a number"),
            ("tiny,fused=yes", "fused is true or false"),
            ("tiny,quant-down=Q9_K", "quant-down is one of F32, F16"),
            ("tiny,n-expert-used=17", "n-expert-used is 17, it must be from 1 to 16"),
            ("tiny,n-layer=0", "n-layer is 0, it must be from 1 to 512"),
            ("tiny,n-vocab=256", "n-vocab is 256, it must be from 384"),
            ("tiny,quant-down=Q4_K", "rows of 128 elements, but Q4_K needs a multiple of 256"),
            ("tiny,n-head=3", "n-head (3) is not a multiple of n-head-kv (2)"),
            ("tiny,fused=true", "fused needs arch deepseek2 or qwen35moe, not qwen3moe"),
            ("tiny,gating=sigmoid", "qwen3moe has softmax gating, not sigmoid"),
            ("tiny,attention-every=2", "attention-every is 2, it must be 1 with qwen3moe"),
            ("tiny,expert-scale=nan", "expert-scale is nan"),
            ("tiny,expert-scale=2", "expert-scale needs arch deepseek2"),
            ("tiny,arch=gpt-oss", "gpt-oss needs sliding-window above 0"),
            ("tiny-hybrid,attention-every=1", "attention-every is 1"),
            ("tiny-hybrid,n-layer=1,attention-every=2", "at least attention-every layers"),
            ("tiny-fused,rope-dim=64", "rope-dim below head-dim"),
            ("tiny-fused,n-ff-dense=0", "need n-ff-dense above 0"),
            ("tiny-dense,n-expert=4,n-expert-used=2,expert-ff=128", "qwen3 has no experts"),
        ],
    )
    def test_what_cannot_be_built_is_refused_with_its_reason(self, text: str, message: str) -> None:
        with pytest.raises(InputError) as refusal:
            synth.shape_from_text(text)
        assert message in str(refusal.value)

    @given(st.text() | st.text("tiny-fusedbo,=n layer0123456789").map("tiny,".__add__))
    def test_any_text_is_a_shape_or_refused(self, text: str) -> None:
        try:
            shape = synth.shape_from_text(text)
        except InputError as refusal:
            assert str(refusal)
        else:
            check_shape(shape)

    @given(
        n_layer=st.integers(-1, 600),
        n_expert=st.integers(-1, 1100),
        n_expert_used=st.integers(-1, 1100),
        expert_ff=st.integers(-32, 4096),
    )
    def test_sizes_that_are_accepted_fit_their_blocks(
        self, n_layer: int, n_expert: int, n_expert_used: int, expert_ff: int
    ) -> None:
        text = (
            f"tiny,n-layer={n_layer},n-expert={n_expert},"
            f"n-expert-used={n_expert_used},expert-ff={expert_ff}"
        )
        possible = (
            1 <= n_layer <= 512
            and 1 <= n_expert_used <= n_expert <= 1024
            and expert_ff > 0
            and expert_ff % QUANTS["Q5_0"].block == 0
        )
        try:
            shape = synth.shape_from_text(text)
        except InputError:
            assert not possible
        else:
            assert possible
            assert shape.n_expert == n_expert

    def test_qwen3_30b_has_the_real_models_size(self) -> None:
        banks = banks_of("qwen3-30b-a3b")
        assert sum(banks.values()) == 48 * 128 * 3 * 884736
        assert 17.2e9 < synth.planned_bytes(synth.SHAPES["qwen3-30b-a3b"]) < 17.4e9

    def test_mixed_entries_differ_in_size_between_layers(self) -> None:
        banks = banks_of("tiny-mixed")
        down = [banks[f"blk.{layer}.ffn_down_exps.weight"] for layer in range(6)]
        assert [size > min(down) for size in down] == [False, False, True, False, False, True]

    def test_fused_gate_and_up_lie_in_one_bank(self) -> None:
        names = {name.split(".")[2] for name in banks_of("tiny-fused")}
        assert names == {"ffn_gate_up_exps", "ffn_down_exps"}


class TestRunning:
    @pytest.mark.parametrize("name", TINY)
    def test_it_talks(self, name: str, tiny_model: TinyModel) -> None:
        tokens, logits = greedy(tiny_model(name), 128)
        assert np.isfinite(logits).all()
        assert logits.std() > 1
        assert max(collections.Counter(tokens).values()) < 16
        assert len(set(tokens)) > 32

    @pytest.mark.parametrize("name", ["tiny", "tiny,n-vocab=384"])
    def test_any_text_round_trips(self, name: str, tiny_model: TinyModel) -> None:
        llm = llama_cpp.Llama(str(tiny_model(name)), vocab_only=True, verbose=False)
        everything = "".join(map(chr, range(0x500))).encode() + TEXT.encode()
        assert llm.detokenize(llm.tokenize(everything, add_bos=False)) == everything
        assert llm.tokenize(b"<|im_end|>", add_bos=False, special=True) == [llm.token_eos()]
        llm.close()

    def test_greedy_text_is_words(self, tiny_model: TinyModel) -> None:
        llm = load(tiny_model())
        answer: Any = llm.create_completion(TEXT, max_tokens=64, temperature=0)
        text = answer["choices"][0]["text"]
        assert text.replace(" ", "").isalpha()
        assert text.count(" ") > 16
        llm.close()

    @pytest.mark.parametrize("name", TINY_MOE)
    def test_routing_depends_on_the_token_and_on_its_context(
        self, name: str, tiny_model: TinyModel
    ) -> None:
        shape = synth.SHAPES[name]
        rng = np.random.default_rng(1)
        tokens = rng.integers(256, 1000, (2, 48))
        tokens[1, -1] = tokens[0, -1]
        here, there = (routed(tiny_model(name), row.tolist()) for row in tokens)
        moe_layers = [il for il in range(shape.n_layer) if shape.has_experts(il)]
        assert sorted(here) == moe_layers
        # The last layer may route the last position alone; the one before routes all.
        layer = moe_layers[-2]
        assert len({frozenset(experts) for experts in here[layer]}) > 24
        assert {e for experts in here[layer] for e in experts} == set(range(shape.n_expert))
        assert all(len(set(experts)) == shape.n_expert_used for experts in here[layer])
        assert any(set(here[il][-1]) != set(there[il][-1]) for il in moe_layers)

    def test_chat_template_is_there_unless_declined(self, tiny_model: TinyModel) -> None:
        key = "tokenizer.chat_template"
        for wanted in (True, False):
            path = tiny_model("tiny", chat_template=wanted)
            llm = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
            assert (key in llm.metadata) == wanted
            llm.close()


def routed(path: Path, tokens: list[int]) -> dict[int, list[list[int]]]:
    """Per layer the experts of every position, from the graph of one prefill."""
    found: dict[int, list[list[int]]] = {}

    def see(address: int, ask: bool, _: Any) -> bool:
        node = ggml.Tensor.from_address(address)
        name = node.name.decode()
        if not name.startswith("ffn_moe_topk"):
            return not ask
        if not ask:
            found[int(name.rpartition("-")[2])] = [
                [
                    ctypes.c_int32.from_address(node.data + i * node.nb[0] + j * node.nb[1]).value
                    for i in range(node.ne[0])
                ]
                for j in range(node.ne[1])
            ]
        return True

    callback = low_level.ggml_backend_sched_eval_callback(see)
    model_params = low_level.llama_model_default_params()
    model = low_level.llama_model_load_from_file(str(path).encode(), model_params)
    params = low_level.llama_context_default_params()
    params.n_ctx, params.cb_eval = 256, callback
    params.n_threads = params.n_threads_batch = 1
    context = low_level.llama_init_from_model(model, params)
    array = (low_level.llama_token * len(tokens))(*tokens)
    assert low_level.llama_decode(context, low_level.llama_batch_get_one(array, len(tokens))) == 0
    low_level.llama_free(context)
    low_level.llama_model_free(model)
    return found


class TestWriting:
    def test_the_same_seed_gives_the_same_bytes(self, tmp_path: Path) -> None:
        shape = synth.SHAPES["tiny-mixed"]
        first, again, other = (
            digests(synth.write_model(tmp_path / f"{i}.gguf", shape, seed=seed))
            for i, seed in enumerate((7, 7, 8))
        )
        assert first == again
        assert first != other

    @pytest.mark.parametrize("name", [*TINY, "tiny,shards=7"])
    def test_planned_bytes_are_the_bytes_written(self, name: str, tmp_path: Path) -> None:
        shape = synth.shape_from_text(name)
        steps: list[tuple[int, int]] = []
        paths = synth.write_model(
            tmp_path / "m.gguf", shape, seed=3, progress=lambda *step: steps.append(step)
        )
        planned = synth.planned_bytes(shape)
        assert sum(path.stat().st_size for path in paths) == planned
        assert steps == sorted(steps)
        assert {total for _, total in steps} == {planned}
        assert steps[-1][0] == planned

    def test_shards_are_one_model(self, tiny_model: TinyModel) -> None:
        first = tiny_model("tiny-split")
        names = sorted(path.name for path in first.parent.iterdir())
        assert names == [f"tiny-split-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
        whole, split = greedy(tiny_model("tiny,shards=1"), 8), greedy(first, 8)
        again = greedy(tiny_model("tiny,shards=9"), 8)
        assert whole[0] == again[0]
        assert np.array_equal(whole[1], again[1])
        assert np.array_equal(whole[1], split[1])

    def test_shards_are_of_similar_size(self, tmp_path: Path) -> None:
        paths = synth.write_model(tmp_path / "m.gguf", synth.SHAPES["tiny"], shards=4)
        sizes = [path.stat().st_size for path in paths]
        assert len(sizes) == 4
        assert max(sizes) < 2 * min(sizes)

    def test_every_tensor_can_have_a_file_of_its_own(self, tmp_path: Path) -> None:
        shape = synth.shape_from_text("tiny,n-layer=1")
        n_tensors = len(plan_tensors(shape))
        assert len(synth.write_model(tmp_path / "m.gguf", shape, shards=n_tensors)) == n_tensors
        with pytest.raises(InputError, match=f"must be from 1 to {n_tensors}"):
            synth.write_model(tmp_path / "n.gguf", shape, shards=n_tensors + 1)

    def test_memory_does_not_grow_with_the_model(self, tmp_path: Path) -> None:
        shape = synth.shape_from_text("tiny,n-layer=2,n-embd=1024,expert-ff=512,n-expert=128")
        tracemalloc.start()
        (path,) = synth.write_model(tmp_path / "m.gguf", shape)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert path.stat().st_size > 200 << 20
        assert peak < 64 << 20
        path.unlink()


class Interruption:
    """Raises Ctrl-C's exception in the middle of the writing."""

    def __call__(self, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt


class TestRefusals:
    @pytest.fixture
    def target(self, tmp_path: Path) -> Iterator[Path]:
        yield tmp_path / "m.gguf"
        assert not list(tmp_path.glob("*.partial"))

    @pytest.mark.parametrize("shards", [1, 3])
    def test_an_interrupted_write_leaves_nothing(self, target: Path, shards: int) -> None:
        with pytest.raises(KeyboardInterrupt):
            synth.write_model(target, synth.SHAPES["tiny"], shards=shards, progress=Interruption())
        assert not list(target.parent.iterdir())

    def test_an_interrupted_overwrite_keeps_the_old_file(self, target: Path) -> None:
        target.write_text("precious")
        with pytest.raises(KeyboardInterrupt):
            synth.write_model(target, synth.SHAPES["tiny"], force=True, progress=Interruption())
        assert target.read_text() == "precious"

    def test_an_existing_file_is_overwritten_only_by_force(self, target: Path) -> None:
        target.write_text("precious")
        with pytest.raises(InputError, match=r"m\.gguf exists: .* --force"):
            synth.write_model(target, synth.SHAPES["tiny"])
        assert target.read_text() == "precious"
        synth.write_model(target, synth.SHAPES["tiny"], force=True)
        assert target.read_bytes()[:4] == b"GGUF"

    def test_an_existing_shard_is_noticed(self, target: Path) -> None:
        second = target.with_name("m-00002-of-00003.gguf")
        second.write_text("precious")
        with pytest.raises(InputError, match="m-00002-of-00003"):
            synth.write_model(target, synth.SHAPES["tiny"], shards=3)
        assert list(target.parent.iterdir()) == [second]

    def test_a_full_disk_is_noticed_before_writing(
        self, target: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        free = SimpleNamespace(free=10**9)
        monkeypatch.setattr("shutil.disk_usage", lambda _: free)
        with pytest.raises(InputError) as refusal:
            synth.write_model(target, synth.SHAPES["qwen3-30b-a3b"])
        assert "has 1.0 GB free" in str(refusal.value)
        assert "takes 17.3 GB" in str(refusal.value)
        assert "make room for 16.4 GB more" in str(refusal.value)
        assert not target.exists()

    def test_a_disk_that_fills_up_leaves_nothing(
        self, target: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(InputError, match=r"filled up while writing 5\.8 MB; nothing"):
                synth.write_model(target, synth.SHAPES["tiny"])
        assert not target.exists()

    @pytest.mark.parametrize(
        ("place", "message"),
        [("nowhere/m.gguf", "is not a folder: create it"), (".", "is a folder: give the name")],
    )
    def test_impossible_places(self, target: Path, place: str, message: str) -> None:
        with pytest.raises(InputError, match=message):
            synth.write_model(target.parent / place, synth.SHAPES["tiny"], force=True)

    def test_a_path_without_a_name(self) -> None:
        with pytest.raises(InputError, match="give the name of a file"):
            synth.write_model("", synth.SHAPES["tiny-split"])

    def test_impossible_numbers(self, target: Path) -> None:
        with pytest.raises(InputError, match="seed -1 is not allowed"):
            synth.write_model(target, synth.SHAPES["tiny"], seed=-1)
        with pytest.raises(InputError, match="0 shards are not possible"):
            synth.write_model(target, synth.SHAPES["tiny"], shards=0)
