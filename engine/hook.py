"""The eval callback: route, decide, load.

llama.cpp asks about every node of every graph (some 3 000 per token) whether we want to see it,
and calls back after computing a node that we marked. Marked are the learned nodes of each layer:
at the routing node the chosen experts are known and nothing has touched them yet, so that is where
they are staged and read.

Asking is the hot path: a graph that was asked before comes with the same addresses in the same
order, so an ask compares one address with the one expected at its place. Where a graph differs,
nodes are recognised by name from there on. A learned node that does not arrive stops the graph
before anything unloaded can be used (`GraphChanged`).

Compiled code, where there is any, stands before us (`engine/native/front.c`): it answers for nodes
that are where they are expected, and handles routings that it may load. Both look at one `Front`.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from engine import ggml
from engine import native_library as native
from engine.errors import GraphChanged
from engine.ggml import AbortFlag, Tensor, llama
from engine.graph import Node
from engine.loading import ExpertLoader
from engine.marks import Mark, Role
from engine.routing import ExpertRouter


class GraphCapture:
    """Asks of one graph, recorded as descriptions for `graph.learn`."""

    def __init__(self) -> None:
        self._op_names = {number: name for name, number in ggml.op_numbers().items()}
        self.nodes: list[Node] = []
        self.leaves: dict[int, str] = {}

    def take(self, address: int) -> None:
        """Record a node and the named leaves that it reads."""
        tensor = Tensor.from_address(address)
        sources = tuple(source or 0 for source in tensor.src)
        self.nodes.append(
            Node(
                address,
                tensor.name.decode(errors="replace"),
                self._op_names.get(tensor.op, str(tensor.op)),
                sources,
                tensor.view_src or 0,
            )
        )
        for source in sources:
            if source and source not in self.leaves:
                leaf = Tensor.from_address(source)
                if leaf.op == 0:
                    self.leaves[source] = leaf.name.decode(errors="replace")

    def weight_address(self, leaf: int) -> int:
        """Where a recorded leaf's data is."""
        return Tensor.from_address(leaf).data or 0


class EvalHook:
    """The callback of one context: which nodes to stop at, and proof that none was missed.

    Quiet until a router is installed; while a graph is recorded it only listens.
    """

    def __init__(self, abort: AbortFlag) -> None:
        self._abort = abort
        callback_type = llama.ggml_backend_sched_eval_callback
        self._front = native.Front(routing=-1)
        self._in_python = callback_type(self._callback)
        self.function, self.data = self._in_python, None
        """The callback and its data, for llama.cpp. Both live as long as we do."""
        if native.library is not None:
            self._front.slow = ctypes.cast(self._in_python, ctypes.c_void_p).value
            self._front.data_offset = Tensor.data.offset
            self._front.shape_offset = Tensor.ne.offset
            self._front.sources_offset = Tensor.src.offset
            self._front.name_offset = Tensor.name.offset
            self.function = callback_type(native.address_of_callback())
            self.data = ctypes.addressof(self._front)
        self._capture: GraphCapture | None = None
        self.error: BaseException | None = None
        self._router: ExpertRouter | None = None
        self._loader: ExpertLoader | None = None
        self._marks_by_name: dict[bytes, Mark] = {}
        self._layer_of_experts: dict[bytes, int] = {}
        self._n_layers = 0
        self._mul_mat_id = ggml.op_numbers()["MUL_MAT_ID"]
        self._forget_graph()

    def record(self, capture: GraphCapture | None) -> None:
        """Write the next graph's nodes down in `capture` and visit none; None: go on as usual."""
        self._capture = capture
        self._front.index = 0

    def install(self, router: ExpertRouter) -> None:
        """From now on, let `router` handle every routing."""
        self._router, self._loader = router, router.loader
        layers = router.plan.layers
        self._n_layers = len(layers)
        self._layer_of_experts = {
            user.encode(): index for index, layer in enumerate(layers) for user in layer.bank_users
        }
        self.mark_nodes()

    def mark_nodes(self) -> None:
        """After a change of the router's settings: stop at the nodes it needs now."""
        assert self._router is not None
        self._marks_by_name = {name.encode(): mark for name, mark in self._router.marks()}
        self._forget_graph()

    def begin(self) -> None:
        """Before each llama_decode."""
        front = self._front
        front.index = front.visited = front.stopped = front.failed = 0
        front.routing = -1
        core = self._loader.core if self._loader is not None else None
        front.core = core.pointer if core is not None else None
        self.error = None

    def end(self) -> None:
        """After each llama_decode that was not stopped; raises what went wrong in the callback."""
        if self.error is None:
            self._finish_graph()
        self.check()

    def check(self) -> None:
        """Raise what went wrong in the callback, if anything did."""
        if self.error is not None:
            raise self.error

    def _forget_graph(self) -> None:
        self._expect([], [])
        self._recorded: list[int] = []
        self._recorded_marks: list[Mark | None] = []
        self._front.index = 0
        self._front.visited = 0
        self._routings_asked = 0
        self._stages_asked = 0
        self._front.since_mark = 0
        self._pending: Mark | None = None
        self._front.known = 0

    def _expect(self, addresses: list[int], marks: list[Mark | None]) -> None:
        """The next graph is expected to come with these nodes."""
        self._expected, self._expected_marks = addresses, marks
        self._expected_arrays = (
            np.array(addresses, np.uint64),
            np.array([_role_of(mark) for mark in marks], np.uint8),
            np.array([mark.index if mark else 0 for mark in marks], np.int32),
            np.array([mark.bank if mark else 0 for mark in marks], np.int32),
        )
        names = {mark: name for name, mark in self._marks_by_name.items()}
        self._expected_names = (ctypes.c_char_p * len(marks))(
            *(names[mark] if mark else None for mark in marks)
        )
        front = self._front
        front.expected, front.roles, front.layers, front.banks = (
            array.ctypes.data for array in self._expected_arrays
        )
        front.names = ctypes.addressof(self._expected_names)
        front.n_expected = len(addresses)

    def _callback(self, address: int, ask: bool, _data: Any) -> bool:
        if not ask:
            return self._visit(address)
        # Written for speed: without compiled code this runs for every node of every token.
        front = self._front
        index = front.index
        front.index = index + 1
        if index == 0:
            if self._capture is not None:
                front.index = 0
                self._capture.take(address)
                return False
            self._begin_graph()
        if front.known and index < front.n_expected and self._expected[index] == address:
            mark = self._expected_marks[index]
            if mark is None:
                return False
            # Most layers have no read under way when their experts are computed.
            if mark.role is Role.EXPERTS and self._loader and not self._loader.is_flying:
                return False
            return self._mark_arrives(address, mark, index)
        return self._ask_by_name(address, index)

    def _begin_graph(self) -> None:
        self._front.known = bool(self._expected)
        self._front.visited = 0
        self._routings_asked = 0
        self._stages_asked = 0
        self._front.since_mark = 0
        self._recorded, self._recorded_marks = [], []

    def _mark_arrives(self, address: int, mark: Mark, index: int) -> bool:
        # An equal address may be another node of a rebuilt graph; its name tells.
        if self._marks_by_name.get(Tensor.from_address(address).name) != mark:
            return self._ask_by_name(address, index)
        return self._arrives(mark, address, index + 1)

    def _ask_by_name(self, address: int, index: int) -> bool:
        if self._front.known:
            self._front.known = False
            self._recorded = self._expected[:index]
            self._recorded_marks = self._expected_marks[:index]
            self._recheck(index)
        tensor = Tensor.from_address(address)
        name = tensor.name
        mark = self._marks_by_name.get(name)
        if tensor.op == self._mul_mat_id:
            self._check_experts(name)
        if mark is not None and mark.role is Role.ROUTING and mark.index < self._front.visited:
            # The same layer again: llama.cpp split the batch, and this is the next graph.
            self._finish_graph()
            self._begin_graph()
            self._front.known = False
        self._recorded.append(address)
        self._recorded_marks.append(mark)
        if mark is None:
            return False
        return self._arrives(mark, address, len(self._recorded))

    def _arrives(self, mark: Mark, address: int, next_place: int) -> bool:
        assert self._router is not None
        if mark.role is Role.EXPERTS:
            return self._experts_arrive(mark, next_place)
        self._router.seen(mark, address)
        if not mark.visit:
            return False
        self._pending = mark
        self._front.since_mark = next_place
        if mark.role is Role.ROUTING:
            self._routings_asked += 1
            if mark.stages and self._front.core and self._router.only_loads:
                self._front.routing = mark.index
        elif mark.index >= self._routings_asked:
            self._fail(GraphChanged(f"a layer's weights came before its routing ({mark})"))
        if mark.stages:
            self._stages_asked += 1
        return True

    def _experts_arrive(self, mark: Mark, next_place: int) -> bool:
        """Nothing is computed behind the last stop while asking, so waiting here is in time."""
        assert self._router is not None
        try:
            stop = self._router.loader.experts_asked(mark.index, mark.bank)
        except BaseException as error:  # must not pass through C; the session raises it
            self._fail(error)
            return True
        if stop:
            self._pending = mark
            self._front.since_mark = next_place
        return stop

    def _recheck(self, index: int) -> None:
        """A graph that differs from `index` on may have differed since the last mark."""
        for place in range(self._front.since_mark, index):
            tensor = Tensor.from_address(self._expected[place])
            if tensor.name in self._marks_by_name:
                self._fail(GraphChanged(f"node {tensor.name!r} came at another place than learned"))
            elif tensor.op == self._mul_mat_id:
                self._check_experts(tensor.name)

    def _check_experts(self, name: bytes) -> None:
        """Experts may only be computed after their routing was marked in this graph."""
        index = self._layer_of_experts.get(name)
        if index is None:
            self._fail(GraphChanged(f"experts are used by an unknown node, {name!r}"))
        elif index >= self._stages_asked:
            self._fail(GraphChanged(f"experts of {name!r} are used before they are read"))

    def _finish_graph(self) -> None:
        if self._front.visited != self._n_layers:
            self._fail(
                GraphChanged(
                    f"{self._front.visited} of {self._n_layers} routings arrived in a graph"
                )
            )
        elif self._loader is not None and self._loader.is_flying:
            self._fail(GraphChanged("experts that were read were not used where learned"))
        elif not self._front.known:
            self._expect(self._recorded, self._recorded_marks)

    def _fail(self, error: BaseException) -> None:
        """Stop the graph; the session raises `error` when llama.cpp returns."""
        if self.error is None:
            self.error = error
        self._abort.set()

    def _visit(self, address: int) -> bool:
        mark = self._pending
        if mark is None or self.error is not None:
            return True
        try:
            assert self._router is not None
            if self._front.failed:
                core = self._router.loader.core
                assert core is not None
                core.fail()
            if mark.stages:
                self._front.visited += 1
            self._router.visit(mark, address)
        except BaseException as error:  # must not pass through C; the session raises it
            self._fail(error)
        return True


def _role_of(mark: Mark | None) -> int:
    if mark is None:
        return native.UNMARKED
    return native.EXPERTS if mark.role is Role.EXPERTS else native.MARKED
