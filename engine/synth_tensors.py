"""Which tensors a synthetic model consists of, and how its random weights are scaled.

Pure. The scales follow one rule: what goes through a matrix keeps about unit size, so that no
layer drowns the others, routing depends on the context and logits are finite and well spread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from engine.synth_shapes import QUANTS, ModelShape

N_BYTE_TOKENS = 256
N_SPECIAL_TOKENS = 5
ROUTER_SPREAD = 1.5
"""Standard deviation of router logits: the chosen experts' weights differ clearly."""
LOGIT_SPREAD = 3.0
CONV_KERNEL = 4


@dataclass(frozen=True)
class TensorPlan:
    """A tensor: values are drawn from a normal distribution, then stored as `quant`."""

    name: str
    ne: tuple[int, ...]
    """elements per dimension, row length first, as ggml counts"""
    quant: str
    sigma: float
    mean: float = 0.0
    quant_key: str = ""
    """the shape key that chose `quant`; empty where the file format fixes it"""
    silent_rows: tuple[tuple[int, int], ...] = ()
    """ranges of rows that are zero"""

    @property
    def n_rows(self) -> int:
        """How many rows of `ne[0]` elements the tensor has."""
        return math.prod(self.ne[1:])

    @property
    def n_bytes(self) -> int:
        """Size in the file, without padding."""
        quant = QUANTS[self.quant]
        return self.ne[0] * self.n_rows // quant.block * quant.block_bytes


def plan_tensors(shape: ModelShape) -> list[TensorPlan]:
    """Every tensor of the model, in file order."""
    plans = [
        _plan("token_embd.weight", (shape.n_embd, shape.n_vocab), shape, "embd", sigma=1.0),
        _norm("output_norm.weight", shape.n_embd),
        _output(shape),
    ]
    for layer in range(shape.n_layer):
        plans += _block(shape, layer)
    return plans


def _output(shape: ModelShape) -> TensorPlan:
    # A zero row is a logit of 0, which always loses against the largest of many random ones: raw
    # bytes and end tokens never interrupt greedy text, and sampling meets them rarely.
    silent = (
        (0, N_BYTE_TOKENS),
        (shape.n_vocab - N_SPECIAL_TOKENS, shape.n_vocab),
    )
    return TensorPlan(
        "output.weight",
        (shape.n_embd, shape.n_vocab),
        shape.quant_output,
        LOGIT_SPREAD / math.sqrt(shape.n_embd),
        quant_key="quant-output",
        silent_rows=silent,
    )


def _block(shape: ModelShape, layer: int) -> Iterator[TensorPlan]:
    prefix = f"blk.{layer}."
    second_norm = "ffn_norm"
    if shape.arch in ("gpt-oss", "qwen35moe"):
        second_norm = "post_attention_norm"
    yield _norm(f"{prefix}attn_norm.weight", shape.n_embd)
    if not shape.has_attention(layer):
        yield from _recurrent(shape, prefix)
    elif shape.arch == "deepseek2":
        yield from _compressed_attention(shape, prefix)
    else:
        yield from _attention(shape, prefix)
    yield _norm(f"{prefix}{second_norm}.weight", shape.n_embd)
    if shape.has_experts(layer):
        yield from _router(shape, prefix)
        yield from _experts(shape, prefix, layer)
        yield from _shared_expert(shape, prefix)
    else:
        yield from _feed_forward(shape, prefix, "", shape.n_ff_dense)


def _attention(shape: ModelShape, prefix: str) -> Iterator[TensorPlan]:
    n_q = shape.n_head * shape.head_dim
    n_kv = shape.n_head_kv * shape.head_dim
    # qwen35moe's query projection also makes the gate of the attention's output.
    gates = 2 if shape.arch == "qwen35moe" else 1
    yield _plan(f"{prefix}attn_q.weight", (shape.n_embd, n_q * gates), shape, "attn", gain=1.5)
    yield _plan(f"{prefix}attn_k.weight", (shape.n_embd, n_kv), shape, "attn", gain=1.5)
    yield _plan(f"{prefix}attn_v.weight", (shape.n_embd, n_kv), shape, "attn")
    yield _plan(f"{prefix}attn_output.weight", (n_q, shape.n_embd), shape, "attn", gain=1.5)
    if shape.arch == "gpt-oss":
        for name, width in (("q", n_q), ("k", n_kv), ("v", n_kv), ("output", shape.n_embd)):
            yield _small(f"{prefix}attn_{name}.bias", (width,), 0.1)
        yield _small(f"{prefix}attn_sinks.weight", (shape.n_head,), 1.0)
    else:
        # Normalised queries and keys give logits of unit spread; more makes attention pick.
        yield _norm(f"{prefix}attn_q_norm.weight", shape.head_dim, mean=1.5)
        yield _norm(f"{prefix}attn_k_norm.weight", shape.head_dim, mean=1.5)


def _compressed_attention(shape: ModelShape, prefix: str) -> Iterator[TensorPlan]:
    rank, heads = shape.kv_lora_rank, shape.n_head
    plain = shape.head_dim - shape.rope
    n_q = heads * shape.head_dim
    yield _plan(f"{prefix}attn_q.weight", (shape.n_embd, n_q), shape, "attn", gain=1.5)
    yield _plan(f"{prefix}attn_kv_a_mqa.weight", (shape.n_embd, rank + shape.rope), shape, "attn")
    yield _norm(f"{prefix}attn_kv_a_norm.weight", rank)
    # Their rows are too short for K-quants; llama.cpp's own files also fall back to Q8_0 here.
    k_b = (plain, rank, heads)
    yield TensorPlan(f"{prefix}attn_k_b.weight", k_b, "Q8_0", 1.5 / math.sqrt(rank))
    v_b = (rank, shape.head_dim, heads)
    yield TensorPlan(f"{prefix}attn_v_b.weight", v_b, "Q8_0", 1.0 / math.sqrt(rank))
    yield _plan(f"{prefix}attn_output.weight", (n_q, shape.n_embd), shape, "attn", gain=1.5)


def _recurrent(shape: ModelShape, prefix: str) -> Iterator[TensorPlan]:
    state = state_dim(shape)
    heads = shape.n_state_head
    value = state * heads
    mixed = value + 2 * state * (heads // 2)
    yield _plan(f"{prefix}attn_qkv.weight", (shape.n_embd, mixed), shape, "attn")
    yield _plan(f"{prefix}attn_gate.weight", (shape.n_embd, value), shape, "attn")
    yield _small(f"{prefix}ssm_conv1d.weight", (CONV_KERNEL, mixed), 0.5)
    # Together they forget about a tenth of the state per token.
    yield _small(f"{prefix}ssm_dt.bias", (heads,), 0.5, mean=-2.0)
    yield _small(f"{prefix}ssm_a", (heads,), 0.1, mean=-1.0)
    for name in ("beta", "alpha"):
        sigma = 1.0 / math.sqrt(shape.n_embd)
        yield _small(f"{prefix}ssm_{name}.weight", (shape.n_embd, heads), sigma)
    yield _norm(f"{prefix}ssm_norm.weight", state)
    yield _plan(f"{prefix}ssm_out.weight", (value, shape.n_embd), shape, "attn", gain=1.5)


def state_dim(shape: ModelShape) -> int:
    """Width of a recurrent head: Qwen's is half of an attention head's."""
    return shape.head_dim // 2


def _router(shape: ModelShape, prefix: str) -> Iterator[TensorPlan]:
    sigma = ROUTER_SPREAD / math.sqrt(shape.n_embd)
    yield _small(f"{prefix}ffn_gate_inp.weight", (shape.n_embd, shape.n_expert), sigma)
    if shape.biased:
        yield _small(f"{prefix}ffn_gate_inp.bias", (shape.n_expert,), 0.3)
    if shape.selection_bias:
        yield _small(f"{prefix}exp_probs_b.bias", (shape.n_expert,), 0.1)


def _experts(shape: ModelShape, prefix: str, layer: int) -> Iterator[TensorPlan]:
    n_embd, width, count = shape.n_embd, shape.expert_ff, shape.n_expert
    first = {"gate_up": 2 * width} if shape.fused else {"gate": width, "up": width}
    for name, rows in first.items():
        ne = (n_embd, rows, count)
        yield _plan(f"{prefix}ffn_{name}_exps.weight", ne, shape, "gate_up", gain=1.5)
    down = shape.down_quant(layer)
    yield TensorPlan(
        f"{prefix}ffn_down_exps.weight",
        (width, n_embd, count),
        down,
        2.0 / math.sqrt(width),
        quant_key="quant-down" if down == shape.quant_down else "quant-down-more",
    )
    if shape.biased:
        for name, rows in (*first.items(), ("down", n_embd)):
            yield _small(f"{prefix}ffn_{name}_exps.bias", (rows, count), 0.2)


def _shared_expert(shape: ModelShape, prefix: str) -> Iterator[TensorPlan]:
    if shape.n_shared_expert:
        width = shape.n_shared_expert * shape.expert_ff
        yield from _feed_forward(shape, prefix, "_shexp", width)
        if shape.arch == "qwen35moe":
            sigma = 1.0 / math.sqrt(shape.n_embd)
            yield _small(f"{prefix}ffn_gate_inp_shexp.weight", (shape.n_embd,), sigma)


def _feed_forward(shape: ModelShape, prefix: str, suffix: str, width: int) -> Iterator[TensorPlan]:
    for name in ("gate", "up"):
        ne = (shape.n_embd, width)
        yield _plan(f"{prefix}ffn_{name}{suffix}.weight", ne, shape, "dense", gain=1.5)
    yield _plan(f"{prefix}ffn_down{suffix}.weight", (width, shape.n_embd), shape, "dense")


def _plan(
    name: str,
    ne: tuple[int, ...],
    shape: ModelShape,
    role: str,
    *,
    gain: float = 1.0,
    sigma: float | None = None,
) -> TensorPlan:
    """A matrix of the role's type that lets unit input out at the size of `gain`."""
    if sigma is None:
        sigma = gain / math.sqrt(ne[0])
    quant: str = getattr(shape, f"quant_{role}")
    return TensorPlan(name, ne, quant, sigma, quant_key=f"quant-{role.replace('_', '-')}")


def _small(name: str, ne: tuple[int, ...], sigma: float, *, mean: float = 0.0) -> TensorPlan:
    """A tensor that real files keep in F32, too."""
    return TensorPlan(name, ne, "F32", sigma, mean)


def _norm(name: str, width: int, *, mean: float = 1.0) -> TensorPlan:
    return _small(name, (width,), 0.05, mean=mean)
