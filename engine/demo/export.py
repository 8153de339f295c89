"""Trained weights as a GGUF file. `python -m engine.demo.export --help`.

Needs llama.cpp but not PyTorch: training keeps its weights as numpy arrays. What is multiplied
with a token is stored as Q8_0, the router and the norms as they are.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from engine.demo.shape import Shape
from engine.synth_header import ALIGNMENT, Value, header_bytes
from engine.synth_tensors import TensorPlan
from engine.synth_vocab import CHAT_TEMPLATE

N_SPECIAL_TOKENS = 3
_TEXT, _CONTROL = 1, 3
_NAMES = {
    "attn_norm": "attn_norm",
    "attn_q": "attn_q",
    "attn_k": "attn_k",
    "attn_v": "attn_v",
    "attn_output": "attn_output",
    "attn_q_norm": "attn_q_norm",
    "attn_k_norm": "attn_k_norm",
    "ffn_norm": "ffn_norm",
    "router": "ffn_gate_inp",
    "gate": "ffn_gate_exps",
    "up": "ffn_up_exps",
    "down": "ffn_down_exps",
}
"""What training calls a layer's tensors, and what llama.cpp calls them, in file order."""
_DENSE_NAMES = {"gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}

Arrays = Mapping[str, Any]


def write(path: Path, weights: Path, tokenizer: Path, *, quant: str = "Q8_0") -> None:
    """Write the model; `quant` F32 keeps it exact, to compare."""
    with np.load(weights) as arrays:
        about = json.loads(str(arrays["about"]))
        fields = {key: about.pop(key) for key in Shape.__dataclass_fields__}
        shape = Shape(**fields)
        tensors = list(_tensors(shape, arrays, quant))
    tokens, merges = _vocabulary(tokenizer)
    header = header_bytes(_metadata(shape, tokens, merges, about), [plan for plan, _ in tensors])
    unfinished = path.with_name(path.name + ".partial")
    with unfinished.open("wb") as file:
        file.write(header)
        for plan, values in tensors:
            data = values.tobytes() if plan.quant == "F32" else _q8_0(values)
            assert len(data) == plan.n_bytes, plan.name
            file.write(data + bytes(-len(data) % ALIGNMENT))
    unfinished.replace(path)


def _tensors(shape: Shape, arrays: Arrays, quant: str) -> Iterator[tuple[TensorPlan, Any]]:
    yield _tensor("token_embd", arrays["token_embd"], quant)
    yield _tensor("output_norm", arrays["output_norm"], quant)
    yield _tensor("output", arrays["output"], quant)
    for layer in range(shape.n_layer):
        for own, name in _NAMES.items():
            values = arrays.get(f"layers.{layer}.{own}")
            if values is None:
                continue
            if not shape.n_expert and own in _DENSE_NAMES:
                name, values = _DENSE_NAMES[own], values[0]
            yield _tensor(f"blk.{layer}.{name}", values, "F32" if own == "router" else quant)


def _tensor(name: str, values: Any, quant: str) -> tuple[TensorPlan, Any]:
    values = np.ascontiguousarray(values, np.float32)
    used = quant if values.ndim > 1 else "F32"
    return TensorPlan(f"{name}.weight", values.shape[::-1], used, 0.0), values


def _q8_0(values: Any) -> bytes:
    """Blocks of 32: a scale in half precision, then signed bytes."""
    blocks = values.reshape(-1, 32)
    scales = (np.abs(blocks).max(1) / 127).astype(np.float16)
    divisors = np.where(scales == 0, 1, scales.astype(np.float32))[:, None]
    stored = np.empty(len(blocks), np.dtype([("scale", "<f2"), ("values", "i1", 32)]))
    stored["scale"], stored["values"] = scales, np.rint(blocks / divisors).clip(-127, 127)
    return stored.tobytes()


def _vocabulary(path: Path) -> tuple[list[str], list[str]]:
    """Tokens by id and merges in order from a saved tokenizer."""
    saved = json.loads(path.read_text())
    ids = dict(saved["model"]["vocab"])
    ids.update({token["content"]: token["id"] for token in saved["added_tokens"]})
    merges = [m if isinstance(m, str) else " ".join(m) for m in saved["model"]["merges"]]
    return sorted(ids, key=ids.__getitem__), merges


def _metadata(
    shape: Shape, tokens: list[str], merges: list[str], about: Mapping[str, Any]
) -> dict[str, Value]:
    arch = "qwen3moe" if shape.n_expert else "qwen3"
    own: dict[str, Value] = {
        "context_length": shape.n_ctx,
        "embedding_length": shape.n_embd,
        "block_count": shape.n_layer,
        "feed_forward_length": shape.expert_ff * max(1, shape.n_used),
        "vocab_size": len(tokens),
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": shape.norm_eps,
        "rope.dimension_count": shape.head_dim,
        "rope.freq_base": shape.rope_base,
    }
    if shape.n_expert:
        own["expert_count"] = shape.n_expert
        own["expert_used_count"] = shape.n_used
        own["expert_feed_forward_length"] = shape.expert_ff
    n_text = len(tokens) - N_SPECIAL_TOKENS
    end, _, turn_end = range(n_text, len(tokens))
    return {
        "general.architecture": arch,
        "general.type": "model",
        "general.name": "tuiwork demo",
        "general.description": "a small mixture of experts, trained to show how streaming works",
        "general.license": "apache-2.0",
        "general.quantization_version": 2,
        **{f"tuiwork.training.{key}": value for key, value in about.items()},
        **{f"{arch}.{key}": value for key, value in own.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_TEXT] * n_text + [_CONTROL] * N_SPECIAL_TOKENS,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": end,
        "tokenizer.ggml.eos_token_id": turn_end,
        "tokenizer.ggml.padding_token_id": end,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", type=Path, help="weights.npz of a run")
    parser.add_argument("tokenizer", type=Path, help="tokenizer.json of the corpus")
    parser.add_argument("model", type=Path, help="the GGUF file to write")
    parser.add_argument("--quant", default="Q8_0", choices=("Q8_0", "F32"))
    args = parser.parse_args()
    write(args.model, args.weights, args.tokenizer, quant=args.quant)


if __name__ == "__main__":
    main()
