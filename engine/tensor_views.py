"""Tensors of the graph that is computed now, as arrays over their own memory."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from engine.ggml import Tensor


def matrix_at(tensor: Tensor, c_type: Any, *, rows: int = 1, columns: int = 0) -> np.ndarray:
    """A tensor's two dimensions as an array over its own memory, strides respected."""
    n_rows, n_columns = tensor.ne[rows], tensor.ne[columns]
    strides = (tensor.nb[rows], tensor.nb[columns])
    if n_rows == 0 or n_columns == 0:
        return np.empty((n_rows, n_columns), c_type)
    span = (n_rows - 1) * strides[0] + n_columns * strides[1]
    memory = (ctypes.c_char * span).from_address(tensor.data)
    view: np.ndarray = np.ndarray((n_rows, n_columns), np.dtype(c_type), memory, 0, strides)
    return view


def weights_at(tensor: Tensor, shape: tuple[int, ...]) -> np.ndarray:
    """Routing weights as tokens by slots, from [slots, tokens] or [1, slots, tokens]."""
    tokens, slots = shape
    if (tensor.ne[0], tensor.ne[1]) == (slots, tokens):
        return matrix_at(tensor, ctypes.c_float)
    return matrix_at(tensor, ctypes.c_float, rows=2, columns=1)
