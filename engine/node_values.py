"""The numbers of computed nodes, where llama.cpp keeps them: reading and writing them in place."""

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


def ids_of_one(tensor: Tensor, used: int) -> ctypes.Array[ctypes.c_int32]:
    """The first ids of a routing of one token, in place."""
    # They lie side by side whatever the strides of the view are.
    return (ctypes.c_int32 * used).from_address(tensor.data)


def weights_of_one(tensor: Tensor, slots: int, used: int) -> ctypes.Array[ctypes.c_float] | None:
    """The first of one token's `slots` weights, in place; None where they have gaps."""
    ne, nb = tensor.ne, tensor.nb
    stride = nb[0] if ne[0] == slots else nb[1] if (ne[0], ne[1]) == (1, slots) else 0
    if stride != ctypes.sizeof(ctypes.c_float):
        return None
    return (ctypes.c_float * used).from_address(tensor.data)
