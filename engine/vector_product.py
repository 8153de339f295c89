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
from engine.ggml import TYPE_F32, ComputePlan, Tensor, declare

TYPE_Q8_0 = 8
BLOCK = 32
"""Numbers in a block of Q8_0, which have one scale."""

_pointer, _int, _i64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_quantize_types = (_int, _pointer, _pointer, _i64, _i64, _i64, _pointer)
_quantize = declare(ggml.base, "ggml_quantize_chunk", ctypes.c_size_t, *_quantize_types)
# For some 15 us it is not worth to give the interpreter away and wait for it again.
_holding = ctypes.PyDLL(ggml.cpu._name)
_compute = declare(_holding, "ggml_graph_compute", _int, _pointer, ctypes.POINTER(ComputePlan))


def can_multiply(matrix: npt.NDArray[np.float32]) -> bool:
    """Whether a matrix has whole blocks in its rows."""
    return matrix.size > 0 and matrix.shape[1] % BLOCK == 0


def compute_address() -> int:
    """Of ggml's function that computes a graph by a plan."""
    return ctypes.cast(_compute, _pointer).value or 0


class VectorProduct:
    """The product of a matrix with one vector after the other. For one thread at a time."""

    def __init__(self, matrix: npt.NDArray[np.float32]) -> None:
        """`matrix`: rows by columns; it is copied. `can_multiply` must hold of it."""
        rows, columns = matrix.shape
        context = ggml.new_context(n_tensors=8)
        weakref.finalize(self, ggml.free_context, context)
        weights = ggml.new_matrix(context, TYPE_Q8_0, columns, rows)
        vector = ggml.new_matrix(context, TYPE_F32, columns, 1)
        product = ggml.mul_mat(context, weights, vector)
        self._weights = np.empty(ggml.nbytes(weights), np.uint8)
        self._product = np.empty(rows, np.float32)
        source = np.ascontiguousarray(matrix)
        target = self._weights.ctypes.data
        _quantize(TYPE_Q8_0, source.ctypes.data, target, 0, rows, columns, None)
        Tensor.from_address(weights).data = target
        Tensor.from_address(product).data = self._product.ctypes.data
        self._vector = Tensor.from_address(vector)
        self._graph = ggml.new_graph(context, 2, False)
        ggml.expand_graph(self._graph, product)
        self._plan = ggml.plan_graph(self._graph, 1, None)
        self._work = np.empty(self._plan.work_size, np.uint8)
        self._plan.work_data = self._work.ctypes.data
        self._plan_address = ctypes.byref(self._plan)

    @property
    def graph(self) -> int:
        """The address of ggml's graph of it."""
        graph: int = self._graph
        return graph

    @property
    def plan_address(self) -> int:
        """Of the plan with which the graph is computed."""
        return ctypes.addressof(self._plan)

    @property
    def vector_slot(self) -> int:
        """The address at which the graph looks up where its vector is."""
        return ctypes.addressof(self._vector) + Tensor.data.offset

    @property
    def result_address(self) -> int:
        """Where the graph leaves the product, f32 by row."""
        return self._product.ctypes.data

    def with_vector_at(self, address: int) -> npt.NDArray[np.float32]:
        """The product with the f32 at `address`, one per column; valid until the next call."""
        self._vector.data = address
        _compute(self._graph, self._plan_address)
        return self._product
