"""What is learned from a graph, by value: hand-written graphs of every way to weigh experts."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from engine.errors import GraphError
from engine.graph import GraphPlan, Node, learn


@dataclass
class Graph:
    """Builds nodes in compute order; sources are names of earlier nodes or of weights."""

    nodes: list[Node] = field(default_factory=list)
    leaves: dict[int, str] = field(default_factory=dict)
    _addresses: dict[str, int] = field(default_factory=dict)

    def weight(self, name: str) -> str:
        address = self._addresses.setdefault(name, 0x1000 + 16 * len(self._addresses))
        self.leaves[address] = name
        return name

    def add(self, name: str, op: str, *sources: str) -> str:
        address = 0x100000 + 16 * len(self.nodes)
        self.nodes.append(Node(address, name, op, tuple(self._addresses[s] for s in sources)))
        self._addresses[name] = address
        return name

    def learn(self) -> GraphPlan:
        return learn(self.nodes, self.leaves)


def routed(graph: Graph, layer: int) -> tuple[str, str]:
    """A router as llama.cpp builds it: (ids, gathered weights)."""
    n = f"-{layer}"
    graph.add("norm" + n, "RMS_NORM", graph.weight(f"blk.{layer}.norm"))
    graph.add("logits" + n, "MUL_MAT", graph.weight(f"blk.{layer}.gate_inp"), "norm" + n)
    graph.add("probs" + n, "SOFT_MAX", "logits" + n)
    graph.add("argsort" + n, "ARGSORT", "probs" + n)
    ids = graph.add("topk" + n, "VIEW", "argsort" + n)
    graph.add("probs" + n + " (reshaped)", "RESHAPE", "probs" + n)
    return ids, graph.add("weights" + n, "GET_ROWS", "probs" + n + " (reshaped)", ids)


def experts(graph: Graph, layer: int, ids: str, current: str) -> str:
    """Split gate, up, down."""
    n = f"-{layer}"
    for role in ("up", "gate"):
        bank = graph.weight(f"blk.{layer}.ffn_{role}_exps.weight")
        graph.add(role + n, "MUL_MAT_ID", bank, current, ids)
    graph.add("glu" + n, "GLU", "gate" + n, "up" + n)
    bank = graph.weight(f"blk.{layer}.ffn_down_exps.weight")
    return graph.add("down" + n, "MUL_MAT_ID", bank, "glu" + n, ids)


def normalised(graph: Graph, layer: int, weights: str) -> str:
    n = f"-{layer}"
    graph.add("flat" + n, "RESHAPE", weights)
    graph.add("sum" + n, "SUM_ROWS", "flat" + n)
    graph.add("clamped" + n, "CLAMP", "sum" + n)
    graph.add("normed" + n, "DIV", "flat" + n, "clamped" + n)
    return graph.add("normed" + n + " (reshaped)", "RESHAPE", "normed" + n)


def test_layers_banks_and_weights_are_found() -> None:
    graph = Graph()
    for layer in (1, 2):
        ids, weights = routed(graph, layer)
        weights = normalised(graph, layer, weights)
        down = experts(graph, layer, ids, f"norm-{layer}")
        graph.add(f"weighted-{layer}", "MUL", down, weights)
    plan = graph.learn()
    assert [layer.number for layer in plan.layers] == [1, 2]
    found = plan.layers[1]
    assert found.routing == "topk-2" and found.ranking == "argsort-2"
    assert found.raw_weights == "weights-2" and found.final_weights == "normed-2"
    assert found.probabilities == "probs-2" and not found.softmax_after
    assert found.banks == [f"blk.2.ffn_{role}_exps.weight" for role in ("up", "gate", "down")]
    assert plan.dense_weights == [
        f"blk.{n}.{name}" for n in (1, 2) for name in ("gate_inp", "norm")
    ]


def test_biases_and_scales_lie_between_experts_and_weights() -> None:
    graph = Graph()
    ids, weights = routed(graph, 0)
    down = experts(graph, 0, ids, "norm-0")
    # A scale per expert is gathered by the routing's ids, too, but from a weight of the model.
    scales = graph.add("scales", "GET_ROWS", graph.weight("blk.0.ffn_down_exps.scale"), ids)
    scaled = graph.add("scaled", "MUL", down, scales)
    biased = graph.add("biased", "ADD_ID", scaled, graph.weight("blk.0.ffn_down_exps.bias"), ids)
    graph.add("weighted", "MUL", biased, weights)
    plan = graph.learn()
    assert plan.layers[0].final_weights == "weights-0"
    assert "blk.0.ffn_down_exps.bias" in plan.dense_weights
    assert "blk.0.ffn_down_exps.scale" in plan.dense_weights


def test_a_softmax_over_the_chosen_is_seen() -> None:
    graph = Graph()
    ids, weights = routed(graph, 0)
    graph.add("flat", "RESHAPE", weights)
    graph.add("node_12", "SOFT_MAX", "flat")
    final = graph.add("softmax", "RESHAPE", "node_12")
    graph.add("weighted", "MUL", experts(graph, 0, ids, "norm-0"), final)
    layer = graph.learn().layers[0]
    assert layer.softmax_after
    # `node_12` counts nodes; in a longer graph it would be another one.
    assert layer.final_weights == "softmax"


def test_weights_applied_before_the_experts_are_found() -> None:
    graph = Graph()
    ids, weights = routed(graph, 0)
    scaled = graph.add("weighted", "MUL", "norm-0", weights)
    experts(graph, 0, ids, scaled)
    assert graph.learn().layers[0].final_weights == "weights-0"


def test_weights_that_come_after_the_experts_cannot_be_waited_for() -> None:
    graph = Graph()
    ids, _ = routed(graph, 0)
    down = experts(graph, 0, ids, "norm-0")
    late = graph.add("late", "GET_ROWS", "probs-0 (reshaped)", ids)
    graph.add("weighted", "MUL", down, late)
    layer = graph.learn().layers[0]
    assert layer.final_weights is None and layer.raw_weights is None


def test_two_routings_of_one_block_are_two_layers() -> None:
    graph = Graph()
    ids, _ = routed(graph, 0)
    experts(graph, 0, ids, "norm-0")
    chunks = graph.add("chunks", "CPY", ids)
    graph.add("chunk", "MUL_MAT_ID", graph.weight("blk.0.ffn_chunk_exps.weight"), "glu-0", chunks)
    assert [layer.routing for layer in graph.learn().layers] == ["topk-0", "chunks"]


def test_experts_that_are_no_weights_are_refused() -> None:
    graph = Graph()
    ids, _ = routed(graph, 0)
    made = graph.add("made", "MUL", "norm-0", "norm-0")
    graph.add("up", "MUL_MAT_ID", made, "norm-0", ids)
    with pytest.raises(GraphError, match=r"node up .* cannot be streamed"):
        graph.learn()


def test_a_routing_without_a_name_is_refused() -> None:
    graph = Graph()
    routed(graph, 0)
    ids = graph.add("node_7", "VIEW", "argsort-0")
    graph.add("up", "MUL_MAT_ID", graph.weight("blk.0.ffn_up_exps.weight"), "norm-0", ids)
    with pytest.raises(GraphError, match="no name of its own"):
        graph.learn()


def test_a_name_that_two_nodes_bear_is_not_used() -> None:
    graph = Graph()
    ids, weights = routed(graph, 0)
    graph.add("weighted", "MUL", experts(graph, 0, ids, "norm-0"), weights)
    graph.nodes.append(Node(0x900000, "weights-0", "ADD", ()))
    layer = graph.learn().layers[0]
    assert layer.raw_weights is None and layer.final_weights is None
    graph.nodes.append(Node(0x900010, "topk-0", "ADD", ()))
    with pytest.raises(GraphError, match="names 2 nodes"):
        graph.learn()


def test_a_dense_graph_has_no_layers() -> None:
    graph = Graph()
    graph.add("out", "MUL_MAT", graph.weight("output.weight"), graph.weight("norm.weight"))
    plan = graph.learn()
    assert plan.layers == [] and plan.dense_weights == ["norm.weight", "output.weight"]


def embedded(graph: Graph, name: str = "token_embd.weight") -> str:
    """A model's first node: the rows of the tokens, which are an input."""
    graph._addresses.setdefault("inp_tokens", 0x99)
    return graph.add("embd", "GET_ROWS", graph.weight(name), "inp_tokens")


def test_a_weight_of_which_only_rows_are_read_by_token_is_told_apart() -> None:
    graph = Graph()
    graph.add("normed", "MUL", embedded(graph), graph.weight("norm.weight"))
    graph.add("logits", "MUL_MAT", graph.weight("output.weight"), "normed")
    plan = graph.learn()
    assert plan.row_weights == ["token_embd.weight"]
    assert plan.dense_weights == ["norm.weight", "output.weight"]


@pytest.mark.parametrize("seen_through", ["", "VIEW", "RESHAPE"])
def test_embeddings_that_are_the_output_too_are_read_whole(seen_through: str) -> None:
    graph = Graph()
    current, table = embedded(graph), "token_embd.weight"
    if seen_through:
        table = graph.add("table", seen_through, table)
    graph.add("logits", "MUL_MAT", table, current)
    plan = graph.learn()
    assert plan.row_weights == [] and plan.dense_weights == ["token_embd.weight"]


def test_rows_that_the_graph_itself_chooses_are_read_for_every_token() -> None:
    graph = Graph()
    ids, _ = routed(graph, 0)
    graph.add("scales", "GET_ROWS", graph.weight("blk.0.scale"), ids)
    graph.add("swapped", "GET_ROWS", "norm-0", graph.weight("blk.0.order"))
    plan = graph.learn()
    assert plan.row_weights == []
    assert {"blk.0.scale", "blk.0.order"} <= set(plan.dense_weights)
