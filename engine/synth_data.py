"""The weights of a synthetic model, in chunks: seeded, quantized, never whole in memory."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from engine import ggml
from engine.synth_shapes import QUANTS
from engine.synth_tensors import TensorPlan

Bytes = npt.NDArray[np.uint8]

CHUNK_BYTES = 8 << 20
TRULY_RANDOM_ELEMENTS = 1 << 18
"""Up to here every element is drawn by itself; a larger tensor repeats blocks from a pool."""
POOL_ELEMENTS = 1 << 19
"""Large enough that two rows are hardly ever the same, small enough to stay in a core's cache."""

_quantize = ggml.declare(
    ggml.base,
    "ggml_quantize_chunk",
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.c_void_p,
)


def tensor_data(plan: TensorPlan, seed: int) -> Iterator[Bytes]:
    """The tensor's bytes, in chunks of at most about CHUNK_BYTES.

    The same plan and seed give the same bytes, whatever else is written. A chunk is valid only
    until the next one.
    """
    rng = np.random.default_rng([seed, zlib.crc32(plan.name.encode())])
    if plan.ne[0] * plan.n_rows <= TRULY_RANDOM_ELEMENTS or plan.quant == "F32":
        blocks = _drawn(plan, rng)
    else:
        blocks = _pooled(plan, rng, seed)
    return _silenced(blocks, plan) if plan.silent_rows else blocks


def _drawn(plan: TensorPlan, rng: np.random.Generator) -> Iterator[Bytes]:
    rows_at_once = max(1, CHUNK_BYTES // 4 // plan.ne[0])
    for first in range(0, plan.n_rows, rows_at_once):
        n_rows = min(rows_at_once, plan.n_rows - first)
        yield _stored(_normal(rng, plan, n_rows * plan.ne[0]), plan, plan.ne[0])


def _pooled(plan: TensorPlan, rng: np.random.Generator, seed: int) -> Iterator[Bytes]:
    pool = _pool(plan.quant, plan.sigma, plan.mean, seed)
    block_bytes = pool.shape[1]
    blocks_per_row = plan.ne[0] // QUANTS[plan.quant].block
    rows_at_once = max(1, CHUNK_BYTES // (blocks_per_row * block_bytes))
    buffer = np.empty((rows_at_once * blocks_per_row, block_bytes), np.uint8)
    for first in range(0, plan.n_rows, rows_at_once):
        n_blocks = min(rows_at_once, plan.n_rows - first) * blocks_per_row
        chosen = rng.integers(0, len(pool), n_blocks)
        # Any other mode than "raise" spares numpy a copy of the whole chunk.
        np.take(pool, chosen, axis=0, out=buffer[:n_blocks], mode="clip")
        yield buffer[:n_blocks].reshape(-1)


@lru_cache(maxsize=16)
def _pool(quant: str, sigma: float, mean: float, seed: int) -> Bytes:
    """Quantized blocks of one type and scale, one per row."""
    plan = TensorPlan("pool", (POOL_ELEMENTS,), quant, sigma, mean)
    rng = np.random.default_rng([seed, zlib.crc32(f"{quant} {sigma!r} {mean!r}".encode())])
    pool = _stored(_normal(rng, plan, POOL_ELEMENTS), plan, QUANTS[quant].block)
    return pool.reshape(-1, QUANTS[quant].block_bytes)


def _normal(rng: np.random.Generator, plan: TensorPlan, n_elements: int) -> npt.NDArray[np.float32]:
    values = rng.standard_normal(n_elements, dtype=np.float32)
    values *= np.float32(plan.sigma)
    values += np.float32(plan.mean)
    return values


def _stored(values: npt.NDArray[np.float32], plan: TensorPlan, row_elements: int) -> Bytes:
    if plan.quant == "F32":
        return values.view(np.uint8)
    quant = QUANTS[plan.quant]
    stored = np.empty(values.size // quant.block * quant.block_bytes, np.uint8)
    n_rows = values.size // row_elements
    _quantize(quant.id, values.ctypes.data, stored.ctypes.data, 0, n_rows, row_elements, None)
    return stored


def _silenced(chunks: Iterator[Bytes], plan: TensorPlan) -> Iterator[Bytes]:
    row_bytes = plan.n_bytes // plan.n_rows
    zero_row = _stored(np.zeros(plan.ne[0], np.float32), plan, plan.ne[0])
    first = 0
    for chunk in chunks:
        rows = chunk.reshape(-1, row_bytes)
        for start, stop in plan.silent_rows:
            rows[max(0, start - first) : max(0, stop - first)] = zero_row
        first += len(rows)
        yield chunk
