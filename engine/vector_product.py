"""One matrix times one vector, computed by ggml on the calling thread.

A guess multiplies a router's matrix for every layer of every token. llama.cpp keeps it as f32,
1 MiB for 128 experts of width 2 048, and fetching that from memory is most of the work. A guess may
be a little wrong, so it uses a copy at 8 bits (Q8_0), a quarter of the bytes.
"""

from __future__ import annotations

import ctypes
import weakref

import numpy as np
import numpy.typing as npt

from engine import ggml
from engine.errors import AbiMismatch
from engine.ggml import TYPE_F32, Tensor, declare

TYPE_Q8_0 = 8
BLOCK = 32
"""Numbers in a block of Q8_0, which have one scale."""

_THREADS_OF_PROOF = 77
"""A count that no other field of a plan holds by chance."""


class _Plan(ctypes.Structure):
    """`struct ggml_cplan` as ggml-cpu.h declares it; `_plan_of` proves where its counts are."""

    _fields_ = [
        ("work_size", ctypes.c_size_t),
        ("work_data", ctypes.c_void_p),
        ("n_threads", ctypes.c_int),
        ("threadpool", ctypes.c_void_p),
        ("abort_callback", ctypes.c_void_p),
        ("abort_callback_data", ctypes.c_void_p),
        ("use_ref", ctypes.c_bool),
    ]


_pointer, _size_t, _int, _i64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
_mul_mat = declare(ggml.base, "ggml_mul_mat", _pointer, _pointer, _pointer, _pointer)
_new_graph = declare(ggml.base, "ggml_new_graph_custom", _pointer, _pointer, _size_t, ctypes.c_bool)
_expand = declare(ggml.base, "ggml_build_forward_expand", None, _pointer, _pointer)
_plan = declare(ggml.cpu, "ggml_graph_plan", _Plan, _pointer, _int, _pointer)
_quantize = declare(
    ggml.base,
    "ggml_quantize_chunk",
    *(_size_t, _int, _pointer, _pointer, _i64, _i64, _i64, _pointer),
)
# For some 15 us it is not worth to give the interpreter away and wait for it again.
_compute = declare(
    ctypes.PyDLL(ggml.cpu._name), "ggml_graph_compute", _int, _pointer, ctypes.POINTER(_Plan)
)


def can_multiply(matrix: npt.NDArray[np.float32]) -> bool:
    """Whether a matrix has whole blocks in its rows."""
    return matrix.size > 0 and matrix.shape[1] % BLOCK == 0


class VectorProduct:
    """The product of a matrix with one vector after the other. For one thread at a time."""

    def __init__(self, matrix: npt.NDArray[np.float32]) -> None:
        """`matrix`: rows by columns; it is copied. `can_multiply` must hold of it.

        Raises AbiMismatch if the library lays a plan of computation out differently.
        """
        n_rows, n_columns = matrix.shape
        context = ggml.new_context(n_tensors=8)
        weakref.finalize(self, ggml.free_context, context)
        weights = ggml.new_matrix(context, TYPE_Q8_0, n_columns, n_rows)
        vector = ggml.new_matrix(context, TYPE_F32, n_columns, 1)
        product = _mul_mat(context, weights, vector)
        self._weights = np.empty(ggml.nbytes(weights), np.uint8)
        self._product = np.empty(n_rows, np.float32)
        source = np.ascontiguousarray(matrix)
        _quantize(
            *(TYPE_Q8_0, source.ctypes.data, self._weights.ctypes.data, 0, n_rows, n_columns, None)
        )
        Tensor.from_address(weights).data = self._weights.ctypes.data
        Tensor.from_address(product).data = self._product.ctypes.data
        self._vector = Tensor.from_address(vector)
        self._graph = _new_graph(context, 2, False)
        _expand(self._graph, product)
        self._plan = _plan_of(self._graph)
        self._work = np.empty(self._plan.work_size, np.uint8)
        self._plan.work_data = self._work.ctypes.data
        self._plan_address = ctypes.byref(self._plan)

    def with_vector_at(self, address: int) -> npt.NDArray[np.float32]:
        """The product with the f32 at `address`, one per column; valid until the next call."""
        self._vector.data = address
        _compute(self._graph, self._plan_address)
        return self._product


def _plan_of(graph: int) -> _Plan:
    if _plan(graph, _THREADS_OF_PROOF, None).n_threads != _THREADS_OF_PROOF:
        raise AbiMismatch("ggml_cplan has another layout in this llama.cpp")
    plan: _Plan = _plan(graph, 1, None)
    return plan
