"""Shapes of synthetic models: what can vary, and the named ones.

Pure: nothing here touches llama.cpp or the disk. Sizes are in elements unless a name says bytes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

Arch = Literal["qwen3moe", "qwen35moe", "gpt-oss", "deepseek2", "qwen3"]
Gating = Literal["softmax", "sigmoid", "softmax-after-topk"]
Quant = Literal[
    "F32", "F16", "BF16", "Q4_0", "Q5_0", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4"
]

MAX_LAYERS = 512
MAX_EXPERTS = 1024
MAX_SHARDS = 9999
SMALLEST_VOCAB = 384
"""256 byte tokens, the special tokens and enough syllables to write a word."""


@dataclass(frozen=True)
class QuantType:
    """How a tensor type is stored. The id is the one GGUF files carry."""

    id: int
    block: int
    """elements per block; a row is a whole number of blocks"""
    block_bytes: int


QUANTS: dict[str, QuantType] = {
    "F32": QuantType(0, 1, 4),
    "F16": QuantType(1, 1, 2),
    "BF16": QuantType(30, 1, 2),
    "Q4_0": QuantType(2, 32, 18),
    "Q5_0": QuantType(6, 32, 22),
    "Q8_0": QuantType(8, 32, 34),
    "Q2_K": QuantType(10, 256, 84),
    "Q3_K": QuantType(11, 256, 110),
    "Q4_K": QuantType(12, 256, 144),
    "Q5_K": QuantType(13, 256, 176),
    "Q6_K": QuantType(14, 256, 210),
    "MXFP4": QuantType(39, 32, 17),
}


@dataclass(frozen=True)
class ModelShape:
    """Everything that decides the size and the graph of a synthetic model."""

    name: str
    description: str
    arch: Arch
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    """with deepseek2: not used, its heads share one compressed row per token"""
    head_dim: int
    n_vocab: int
    n_expert: int
    """0 for a dense model"""
    n_expert_used: int
    expert_ff: int
    n_ctx_train: int = 2048
    n_ff_dense: int = 0
    """width of the feed-forward part of layers without experts"""
    n_leading_dense: int = 0
    """first layers that have no experts"""
    n_shared_expert: int = 0
    """experts every token uses, stored as one, this many times as wide"""
    fused: bool = False
    """gate and up of an expert lie in one bank"""
    gating: Gating = "softmax"
    selection_bias: bool = False
    """a bias that takes part in choosing experts, but not in weighing them"""
    biased: bool = False
    """every expert projection has a bias per expert"""
    expert_scale: float = 1.0
    """factor on the weights of the chosen experts (deepseek2)"""
    kv_lora_rank: int = 0
    """width of the compressed row (deepseek2)"""
    rope_dim: int = 0
    """rotated part of a head (deepseek2, qwen35moe); 0: all of it"""
    attention_every: int = 1
    """one layer in this many has attention, the others a recurrent state (qwen35moe)"""
    n_state_head: int = 0
    """value heads of the recurrent layers; they have half as many key heads (qwen35moe)"""
    sliding_window: int = 0
    """tokens every second layer looks back (gpt-oss)"""
    quant_embd: Quant = "Q4_K"
    quant_output: Quant = "Q6_K"
    quant_attn: Quant = "Q4_K"
    quant_dense: Quant = "Q4_K"
    """feed-forward parts that are always used: dense layers and shared experts"""
    quant_gate_up: Quant = "Q4_K"
    quant_down: Quant = "Q4_K"
    quant_down_more: Quant | Literal[""] = ""
    """type of the down banks of those layers that a Q4_K_M file gives more bits"""
    shards: int = 1
    """files the model is split into unless the caller asks for another number"""

    @property
    def is_moe(self) -> bool:
        """Whether the model has experts at all."""
        return self.n_expert > 0

    @property
    def rope(self) -> int:
        """Rotated elements of a head."""
        return self.rope_dim or self.head_dim

    def has_experts(self, layer: int) -> bool:
        """Whether this layer routes tokens to experts."""
        return self.is_moe and layer >= self.n_leading_dense

    def has_attention(self, layer: int) -> bool:
        """Whether this layer has attention rather than a recurrent state."""
        return (layer + 1) % self.attention_every == 0

    def down_quant(self, layer: int) -> str:
        """The type of a layer's down bank, by the rule of llama.cpp's Q4_K_M mix."""
        eighth = self.n_layer // 8
        more = layer < eighth or layer >= 7 * self.n_layer // 8 or (layer - eighth) % 3 == 2
        return self.quant_down_more if self.quant_down_more and more else self.quant_down


_TINY = ModelShape(
    name="tiny",
    description="16 experts, top-4, gate, up and down in banks of their own",
    arch="qwen3moe",
    n_layer=5,
    n_embd=256,
    n_head=4,
    n_head_kv=2,
    head_dim=64,
    n_vocab=1024,
    n_expert=16,
    n_expert_used=4,
    expert_ff=128,
    quant_down="Q5_0",
)

_TINY_DEEPSEEK = dataclasses.replace(
    _TINY,
    arch="deepseek2",
    n_head_kv=4,
    n_ff_dense=512,
    n_leading_dense=1,
    n_shared_expert=1,
    kv_lora_rank=64,
    rope_dim=32,
    quant_dense="Q8_0",
)

_QWEN3_30B = ModelShape(
    name="qwen3-30b-a3b",
    description="Qwen3-30B-A3B with Q4_K experts throughout: 128 experts, top-8",
    arch="qwen3moe",
    n_layer=48,
    n_embd=2048,
    n_head=32,
    n_head_kv=4,
    head_dim=128,
    n_vocab=151936,
    n_expert=128,
    n_expert_used=8,
    expert_ff=768,
    n_ctx_train=40960,
)

_ALL: tuple[ModelShape, ...] = (
    _TINY,
    dataclasses.replace(
        _TINY_DEEPSEEK,
        name="tiny-fused",
        description="gate and up fused in one bank, a shared expert, a leading dense layer; "
        "weights are not normalised after the choice",
        fused=True,
    ),
    dataclasses.replace(
        _TINY,
        name="tiny-biased",
        description="gpt-oss: biases per expert, softmax after the choice, attention sinks, "
        "sliding windows, MXFP4 experts",
        arch="gpt-oss",
        gating="softmax-after-topk",
        biased=True,
        sliding_window=64,
        quant_attn="Q8_0",
        quant_embd="Q8_0",
        quant_output="Q8_0",
        quant_gate_up="MXFP4",
        quant_down="MXFP4",
    ),
    dataclasses.replace(
        _TINY,
        name="tiny-mixed",
        description="a Q4_K_M mix: the down banks of layers 2 and 5 are Q6_K, so entries differ "
        "in size",
        n_layer=6,
        n_expert=8,
        n_expert_used=3,
        expert_ff=256,
        quant_down="Q4_K",
        quant_down_more="Q6_K",
    ),
    dataclasses.replace(_TINY, name="tiny-split", description="tiny in three files", shards=3),
    dataclasses.replace(
        _TINY_DEEPSEEK,
        name="tiny-sigmoid",
        description="sigmoid gating with a selection bias, normalised and scaled weights, two "
        "shared experts, a leading dense layer (DeepSeek-V3, GLM)",
        gating="sigmoid",
        selection_bias=True,
        expert_scale=1.8,
        n_shared_expert=2,
    ),
    dataclasses.replace(
        _TINY,
        name="tiny-hybrid",
        description="Qwen3.5/3.6: recurrent layers, whose state cannot be rewound token by "
        "token, and a shared expert with a gate of its own",
        arch="qwen35moe",
        n_layer=4,
        n_shared_expert=1,
        rope_dim=16,
        attention_every=4,
        n_state_head=8,
        quant_dense="Q8_0",
    ),
    dataclasses.replace(
        _TINY,
        name="tiny-dense",
        description="no experts: there is nothing to stream",
        arch="qwen3",
        n_layer=4,
        n_expert=0,
        n_expert_used=0,
        expert_ff=0,
        n_ff_dense=512,
    ),
    _QWEN3_30B,
    ModelShape(
        name="qwen3.6-35b-a3b",
        description="Qwen3.6-35B-A3B: 256 experts, top-8, a gated shared expert, three recurrent "
        "layers to one with attention",
        arch="qwen35moe",
        n_layer=40,
        n_embd=2048,
        n_head=16,
        n_head_kv=2,
        head_dim=256,
        n_vocab=248320,
        n_expert=256,
        n_expert_used=8,
        expert_ff=512,
        n_ctx_train=262144,
        n_shared_expert=1,
        rope_dim=64,
        attention_every=4,
        n_state_head=32,
    ),
    ModelShape(
        name="gpt-oss-20b",
        description="gpt-oss-20b: 32 experts, top-4, biases per expert, MXFP4",
        arch="gpt-oss",
        n_layer=24,
        n_embd=2880,
        n_head=64,
        n_head_kv=8,
        head_dim=64,
        n_vocab=201088,
        n_expert=32,
        n_expert_used=4,
        expert_ff=2880,
        n_ctx_train=131072,
        gating="softmax-after-topk",
        biased=True,
        sliding_window=128,
        quant_embd="Q8_0",
        quant_output="Q8_0",
        quant_attn="Q8_0",
        quant_gate_up="MXFP4",
        quant_down="MXFP4",
    ),
    ModelShape(
        name="fused-gate-up",
        description="GLM-4.7-Flash's shape with fused gate-up banks: 64 experts, top-4, sigmoid "
        "gating with a selection bias, a shared expert, a leading dense layer",
        arch="deepseek2",
        n_layer=47,
        n_embd=2048,
        n_head=20,
        n_head_kv=20,
        head_dim=256,
        n_vocab=154880,
        n_expert=64,
        n_expert_used=4,
        expert_ff=1536,
        n_ctx_train=202752,
        n_ff_dense=10240,
        n_leading_dense=1,
        n_shared_expert=1,
        fused=True,
        gating="sigmoid",
        selection_bias=True,
        expert_scale=1.8,
        kv_lora_rank=512,
        rope_dim=64,
    ),
)

SHAPES: dict[str, ModelShape] = {shape.name: shape for shape in _ALL}
"""The named shapes. The tiny ones take a few MB and exist for tests."""
