"""The header of a synthetic GGUF file, written by llama.cpp's own gguf code."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from engine import ggml
from engine.errors import AbiMismatch
from engine.synth_shapes import QUANTS, ModelShape
from engine.synth_tensors import CONV_KERNEL, TensorPlan, state_dim
from engine.synth_vocab import CHAT_TEMPLATE, Vocabulary

Value = bool | int | float | str | list[int] | list[str]

ALIGNMENT = 32
"""Bytes every tensor's place in the file is a multiple of, GGUF's default."""

_GATING_FUNC = {"softmax": 1, "sigmoid": 2, "softmax-after-topk": 3}
_GGUF_INT32, _GGUF_QUANT_VERSION = 5, 2

_ptr, _text, _size_t, _int = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int
_texts = ctypes.POINTER(_text)
_new_tensor = ggml.declare(
    ggml.base, "ggml_new_tensor", _ptr, _ptr, _int, _int, ctypes.POINTER(ctypes.c_int64)
)
_set_name = ggml.declare(ggml.base, "ggml_set_name", _ptr, _ptr, _text)
_init_empty = ggml.declare(ggml.base, "gguf_init_empty", _ptr)
_free = ggml.declare(ggml.base, "gguf_free", None, _ptr)
_set_u16 = ggml.declare(ggml.base, "gguf_set_val_u16", None, _ptr, _text, ctypes.c_uint16)
_set_u32 = ggml.declare(ggml.base, "gguf_set_val_u32", None, _ptr, _text, ctypes.c_uint32)
_set_i32 = ggml.declare(ggml.base, "gguf_set_val_i32", None, _ptr, _text, ctypes.c_int32)
_set_f32 = ggml.declare(ggml.base, "gguf_set_val_f32", None, _ptr, _text, ctypes.c_float)
_set_bool = ggml.declare(ggml.base, "gguf_set_val_bool", None, _ptr, _text, ctypes.c_bool)
_set_str = ggml.declare(ggml.base, "gguf_set_val_str", None, _ptr, _text, _text)
_set_array = ggml.declare(ggml.base, "gguf_set_arr_data", None, _ptr, _text, _int, _ptr, _size_t)
_set_texts = ggml.declare(ggml.base, "gguf_set_arr_str", None, _ptr, _text, _texts, _size_t)
_add_tensor = ggml.declare(ggml.base, "gguf_add_tensor", None, _ptr, _ptr)
_meta_size = ggml.declare(ggml.base, "gguf_get_meta_size", _size_t, _ptr)
_meta_data = ggml.declare(ggml.base, "gguf_get_meta_data", None, _ptr, _ptr)


def header_bytes(
    metadata: dict[str, Value],
    tensors: Sequence[TensorPlan],
    *,
    shard: int = 0,
    shards: int = 1,
    n_all_tensors: int = 0,
) -> bytes:
    """Everything of one file that comes before its tensors' data.

    Of a split model only the first shard carries the metadata, as llama.cpp's gguf-split has it.
    Raises AbiMismatch if this llama.cpp numbers a tensor type otherwise than GGUF does.
    """
    gguf = _init_empty()
    try:
        if shard == 0:
            for key, value in metadata.items():
                _set(gguf, key.encode(), value)
        if shards > 1:
            _set_u16(gguf, b"split.no", shard)
            _set_u16(gguf, b"split.count", shards)
            _set_i32(gguf, b"split.tensors.count", n_all_tensors)
        with ggml.scratch_context(len(tensors) + 1) as context:
            for plan in tensors:
                _add(gguf, context, plan)
        data = ctypes.create_string_buffer(_meta_size(gguf))
        _meta_data(gguf, data)
        return data.raw
    finally:
        _free(gguf)


def _add(gguf: int, context: int, plan: TensorPlan) -> None:
    number = QUANTS[plan.quant].id
    known = ggml.type_name(number) or b""
    if known.decode().lower() != plan.quant.lower():
        raise AbiMismatch(f"this llama.cpp calls tensor type {number} {known!r}, not {plan.quant}")
    ne = (ctypes.c_int64 * len(plan.ne))(*plan.ne)
    tensor = _new_tensor(context, number, len(plan.ne), ne)
    _set_name(tensor, plan.name.encode())
    _add_tensor(gguf, tensor)


def _set(gguf: int, key: bytes, value: Value) -> None:
    if isinstance(value, bool):
        _set_bool(gguf, key, value)
    elif isinstance(value, int):
        _set_u32(gguf, key, value)
    elif isinstance(value, float):
        _set_f32(gguf, key, value)
    elif isinstance(value, str):
        _set_str(gguf, key, value.encode())
    elif isinstance(value[0], int):
        numbers = (ctypes.c_int32 * len(value))(*value)
        _set_array(gguf, key, _GGUF_INT32, numbers, len(value))
    else:
        texts = (_text * len(value))(*(str(text).encode() for text in value))
        _set_texts(gguf, key, texts, len(value))


def model_metadata(
    shape: ModelShape, vocabulary: Vocabulary, seed: int, *, chat_template: bool
) -> dict[str, Value]:
    """The metadata that describe the model, and where it came from."""
    own = {**_common(shape), **_of_arch(shape)}
    end = vocabulary.id_of("<|im_end|>")
    start = vocabulary.id_of("<|endoftext|>")
    metadata: dict[str, Value] = {
        "general.architecture": shape.arch,
        "general.type": "model",
        "general.name": f"synthetic {shape.name}",
        "general.description": f"random weights: {shape.description}",
        "general.quantization_version": _GGUF_QUANT_VERSION,
        "tuiwork.synth.seed": seed,
        **{f"{shape.arch}.{key}": value for key, value in own.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": vocabulary.tokens,
        "tokenizer.ggml.token_type": vocabulary.types,
        "tokenizer.ggml.merges": vocabulary.merges,
        "tokenizer.ggml.bos_token_id": start,
        "tokenizer.ggml.eos_token_id": end,
        "tokenizer.ggml.padding_token_id": start,
        "tokenizer.ggml.add_bos_token": False,
    }
    if chat_template:
        metadata["tokenizer.chat_template"] = CHAT_TEMPLATE
    return metadata


def _common(shape: ModelShape) -> dict[str, Value]:
    own: dict[str, Value] = {
        "context_length": shape.n_ctx_train,
        "embedding_length": shape.n_embd,
        "block_count": shape.n_layer,
        "feed_forward_length": shape.n_ff_dense or shape.expert_ff * max(shape.n_expert_used, 1),
        "vocab_size": shape.n_vocab,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": shape.rope,
        "rope.freq_base": 1e6,
    }
    if shape.is_moe:
        own["expert_count"] = shape.n_expert
        own["expert_used_count"] = shape.n_expert_used
        own["expert_feed_forward_length"] = shape.expert_ff
    return own


def _of_arch(shape: ModelShape) -> dict[str, Value]:
    if shape.arch == "gpt-oss":
        return {"attention.sliding_window": shape.sliding_window}
    if shape.arch == "deepseek2":
        return {
            # With compressed rows attention sees one shared head, as wide as a row.
            "attention.head_count_kv": 1,
            "attention.key_length": shape.kv_lora_rank + shape.rope,
            "attention.value_length": shape.kv_lora_rank,
            "attention.key_length_mla": shape.head_dim,
            "attention.value_length_mla": shape.head_dim,
            "attention.kv_lora_rank": shape.kv_lora_rank,
            "attention.q_lora_rank": 0,
            "leading_dense_block_count": shape.n_leading_dense,
            "expert_shared_count": shape.n_shared_expert,
            "expert_gating_func": _GATING_FUNC[shape.gating],
            "expert_weights_norm": shape.gating == "sigmoid",
            "expert_weights_scale": shape.expert_scale,
        }
    if shape.arch == "qwen35moe":
        third = shape.rope // 2 // 3
        return {
            "expert_shared_feed_forward_length": shape.n_shared_expert * shape.expert_ff,
            "rope.dimension_sections": [shape.rope // 2 - 2 * third, third, third, 0],
            "full_attention_interval": shape.attention_every,
            "ssm.conv_kernel": CONV_KERNEL,
            "ssm.state_size": state_dim(shape),
            "ssm.inner_size": state_dim(shape) * shape.n_state_head,
            "ssm.time_step_rank": shape.n_state_head,
            "ssm.group_count": shape.n_state_head // 2,
        }
    return {}
