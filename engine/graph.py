"""What one captured compute graph tells: expert banks, routing nodes, weights nodes, dense weights.

No table of architectures: a MUL_MAT_ID node names its bank in `src[0]` and its routing ids in
`src[2]`, so every layout that llama.cpp builds with it is found the same way. The nodes where
routing weights are made are found by who consumes them. Pure: works on descriptions of nodes, so
it can be tested without a model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.errors import GraphError
from engine.router_matrix import RouterPlan

_SEES_THROUGH = {"RESHAPE", "VIEW", "CONT", "PERMUTE", "TRANSPOSE"}
_WEIGHT_CHAIN = _SEES_THROUGH | {"DIV", "SCALE", "SOFT_MAX", "CLAMP", "MUL", "ADD", "UNARY", "CPY"}
_AFTER_EXPERTS = _SEES_THROUGH | {"ADD_ID", "ADD"}
_COUNTED_NAME = re.compile(r"^((node|leaf)_\d+)?( \(.*\))?$")
_LAYER_OF_NAME = re.compile(r"^blk\.(\d+)\.")


@dataclass(frozen=True)
class Node:
    """One node of a compute graph, or a leaf that only appears as a source."""

    address: int
    name: str
    op: str
    sources: tuple[int, ...] = ()
    view_of: int = 0


@dataclass
class RoutedLayer:
    """One routing and the experts it chooses from.

    Node names are how the same node is recognised in the next graph.
    """

    number: int
    """The block's number in the model."""
    routing: str
    """The node that holds the chosen experts' ids."""
    banks: list[str] = field(default_factory=list)
    """The weights of each projection, in order of use."""
    bank_users: list[str] = field(default_factory=list)
    """The nodes that multiply by them, in order."""
    users_are_named: bool = True
    """Whether each of `bank_users` can be told from every other node of the graph."""
    raw_weights: str | None = None
    """Where the router's values of the chosen experts are first gathered."""
    final_weights: str | None = None
    """Where the weights are final, before the first expert is computed; None: not found."""
    softmax_after: bool = False
    """Whether the model applies a softmax to the gathered values (a masked slot is then -inf)."""
    probabilities: str | None = None
    """The router's value for every expert, from which `raw_weights` gathers."""
    ranking: str | None = None
    """All experts' ids in order of choice, of which the routing is a view."""
    router: RouterPlan | None = None
    """How the ranking is made; None: in a way that is not understood."""


@dataclass(frozen=True)
class GraphPlan:
    """What the engine needs to know of a model's graphs."""

    layers: list[RoutedLayer]
    dense_weights: list[str]
    """Every weight that is read whole for each token, biases of experts included."""
    row_weights: list[str]
    """Weights of which an input alone picks rows: token embeddings that are not the output's."""
    n_nodes: int


def learn(nodes: Sequence[Node], leaves: dict[int, str]) -> GraphPlan:
    """Find the expert layers of a captured graph.

    `nodes` in compute order; `leaves` are the model's weights by address. Raises GraphError for a
    MUL_MAT_ID whose bank is no weight, because loading its experts could then not be guaranteed.
    """
    graph = _Graph(nodes, leaves)
    layers: dict[int, RoutedLayer] = {}
    bank_names: set[str] = set()
    for node in nodes:
        if node.op != "MUL_MAT_ID":
            continue
        bank = graph.leaf_under(node.sources[0])
        if bank is None:
            raise GraphError(
                f"node {node.name} multiplies by experts that are no weights of the model; "
                "this architecture cannot be streamed"
            )
        routing = graph.node(node.sources[2])
        if _COUNTED_NAME.match(routing.name):
            raise GraphError(
                f"the routing of {node.name} has no name of its own ({routing.name!r}), so it "
                "cannot be recognised; this architecture cannot be streamed"
            )
        layer = layers.get(routing.address)
        if layer is None:
            layer = layers[routing.address] = RoutedLayer(
                _layer_number(bank, len(layers)), routing.name
            )
        if bank not in layer.banks:
            layer.banks.append(bank)
        layer.bank_users.append(node.name)
        bank_names.add(bank)
    for address, layer in layers.items():
        _learn_weights(graph, address, layer)
        layer.router = _learn_router(graph, address)
    _forget_ambiguous_names(nodes, list(layers.values()))
    dense = {name for name in graph.used_leaves() if name not in bank_names}
    rows = graph.leaves_read_by_row() & dense
    return GraphPlan(list(layers.values()), sorted(dense - rows), sorted(rows), len(nodes))


def _forget_ambiguous_names(nodes: Sequence[Node], layers: Sequence[RoutedLayer]) -> None:
    """A name that two nodes bear cannot tell which of them comes in the next graph."""
    times = Counter(node.name for node in nodes)
    for layer in layers:
        if times[layer.routing] > 1:
            raise GraphError(f"{layer.routing} names {times[layer.routing]} nodes of one graph")
        layer.users_are_named = len(layer.bank_users) == len(layer.banks) and all(
            times[user] == 1 and not _COUNTED_NAME.match(user) for user in layer.bank_users
        )
        if layer.raw_weights and times[layer.raw_weights] > 1:
            layer.raw_weights = None
        if layer.final_weights and times[layer.final_weights] > 1:
            layer.final_weights = None
        if times[layer.ranking or ""] > 1 or times[layer.probabilities or ""] > 1:
            layer.ranking = layer.probabilities = None


class _Graph:
    """A captured graph with the look-ups that learning needs."""

    def __init__(self, nodes: Sequence[Node], leaves: dict[int, str]) -> None:
        self._nodes = {node.address: node for node in nodes}
        self._leaves = leaves
        self.position = {node.address: index for index, node in enumerate(nodes)}
        self._consumers: dict[int, list[Node]] = {}
        for node in nodes:
            for source in node.sources:
                if source:
                    self._consumers.setdefault(source, []).append(node)

    def node(self, address: int) -> Node:
        """The node at `address`; a source that is no node is described as a leaf."""
        found = self._nodes.get(address)
        return found or Node(address, self._leaves.get(address, ""), "NONE")

    def consumers(self, address: int) -> list[Node]:
        """Who reads the node at `address`, in compute order."""
        return self._consumers.get(address, [])

    def leaf_under(self, address: int) -> str | None:
        """The weight at `address`, seen through views, or None."""
        while address:
            if address in self._leaves:
                return self._leaves[address]
            node = self._nodes.get(address)
            if node is None or node.op not in _SEES_THROUGH:
                return None
            address = node.sources[0] if node.sources else 0
        return None

    def used_leaves(self) -> Iterator[str]:
        """Names of all weights that some node reads."""
        for node in self._nodes.values():
            for source in node.sources:
                if source in self._leaves:
                    yield self._leaves[source]

    def leaves_read_by_row(self) -> set[str]:
        """Names of all weights that nothing but GET_ROWS reads, and that directly, by an input.

        A weight that is seen through a view counts as read whole: what reads the view may be
        anything. So does one that is gathered by what the graph computed, as scales of chosen
        experts are: every layer of every token reads those, and they are small.
        """
        by_row: set[str] = set()
        otherwise: set[str] = set()
        for node in self._nodes.values():
            for place, source in enumerate((*node.sources, node.view_of)):
                if source in self._leaves:
                    gathers = node.op == "GET_ROWS" and place == 0 and self._is_input(node, 1)
                    (by_row if gathers else otherwise).add(self._leaves[source])
        return by_row - otherwise

    def _is_input(self, node: Node, place: int) -> bool:
        """Whether a node's source is given from outside: no weight, and nothing computed."""
        source = node.sources[place] if len(node.sources) > place else 0
        return bool(source) and source not in self._nodes and source not in self._leaves

    def below_views(self, address: int) -> Node:
        """The node that computed what is seen at `address`."""
        node = self.node(address)
        while node.op in _SEES_THROUGH and node.sources and node.sources[0] in self._nodes:
            node = self.node(node.sources[0])
        return node

    def lowest_named(self, address: int) -> Node | None:
        """The node that computed what is seen at `address`, or the first view of it with a name.

        A name that only counts nodes (`node_38`) is another node's in another graph.
        """
        named = None
        node = self.node(address)
        while True:
            if not _COUNTED_NAME.match(node.name):
                named = node
            if node.op not in _SEES_THROUGH or node.sources[0] not in self._nodes:
                return named
            node = self.node(node.sources[0])


def _layer_number(bank: str, otherwise: int) -> int:
    match = _LAYER_OF_NAME.match(bank)
    return int(match[1]) if match else otherwise


_RANKS = _SEES_THROUGH | {"ARGSORT", "TOP_K"}
_ACTIVATES = {"SOFT_MAX", "UNARY"}


def _learn_router(graph: _Graph, routing: int) -> RouterPlan | None:
    """Walk from the routing back to the router's matrix, if only known steps lie between."""
    path: list[int] = []
    biases: dict[str, str | None] = {"before": None, "after": None}
    activation = ""
    node = graph.node(routing)
    for _ in range(16):
        added = graph.leaf_under(node.sources[1]) if node.op == "ADD" else None
        if node.op == "MUL_MAT":
            matrix = graph.leaf_under(node.sources[0])
            if matrix is None:
                return None
            path.append(1)
            # What is added where nothing is activated below it is added to the router's values.
            before, after = biases["before"], biases["after"]
            if not activation:
                before, after = after, None
            return RouterPlan(tuple(path), matrix, before, after, activation)
        if added is not None:
            place = "before" if activation else "after"
            if biases[place] is not None:
                return None
            biases[place] = added
        elif node.op in _ACTIVATES and not activation:
            activation = node.op
        elif node.op not in _RANKS:
            return None
        if not node.sources:
            return None
        path.append(0)
        node = graph.node(node.sources[0])
    return None


def _learn_weights(graph: _Graph, routing: int, layer: RoutedLayer) -> None:
    users = [
        node
        for node in (graph.node(address) for address in graph.position)
        if node.op == "MUL_MAT_ID" and node.sources[2] == routing
    ]
    final = _weights_after(graph, users[-1], routing) or _weights_before(graph, users[0], routing)
    ranking = graph.node(routing)
    if ranking.op in _SEES_THROUGH and ranking.sources:
        layer.ranking = _stable_name(graph.node(ranking.sources[0]))
    if final is None:
        return
    raw, softmax_after = _raw_weights(graph, final, routing)
    if raw is None or graph.position[final.address] > graph.position[users[0].address]:
        return
    layer.raw_weights = _stable_name(raw)
    layer.softmax_after = softmax_after
    layer.final_weights = final.name
    layer.probabilities = _stable_name(graph.below_views(raw.sources[0]))


def _stable_name(node: Node) -> str | None:
    return None if _COUNTED_NAME.match(node.name) else node.name


def _weights_after(graph: _Graph, down: Node, routing: int) -> Node | None:
    """The other factor of the MUL that scales the experts' outputs."""
    frontier, seen = [down], set()
    while frontier:
        node = frontier.pop(0)
        for user in graph.consumers(node.address):
            if user.address in seen:
                continue
            seen.add(user.address)
            if user.op == "MUL":
                other = _other_source(user, node.address)
                if _raw_weights(graph, graph.node(other), routing)[0] is not None:
                    return graph.lowest_named(other)
                frontier.append(user)
            elif user.op in _AFTER_EXPERTS:
                frontier.append(user)
    return None


def _weights_before(graph: _Graph, first: Node, routing: int) -> Node | None:
    """Where a model scales the experts' inputs instead of their outputs."""
    scaled = graph.below_views(first.sources[1])
    if scaled.op != "MUL":
        return None
    for source in scaled.sources:
        if source and _raw_weights(graph, graph.node(source), routing)[0] is not None:
            return graph.lowest_named(source)
    return None


def _other_source(node: Node, known: int) -> int:
    return next((source for source in node.sources if source and source != known), 0)


def _raw_weights(graph: _Graph, final: Node, routing: int) -> tuple[Node | None, bool]:
    """Follow a weights node back to the GET_ROWS that gathers by the routing's ids.

    Also tells whether a softmax lies between them.
    """
    node, softmax = final, False
    for _ in range(32):
        if node.op == "GET_ROWS":
            gathers_by_routing = len(node.sources) > 1 and _same(graph, node.sources[1], routing)
            from_router = graph.leaf_under(node.sources[0]) is None
            return (node if gathers_by_routing and from_router else None), softmax
        if node.op not in _WEIGHT_CHAIN or not node.sources:
            return None, softmax
        softmax = softmax or node.op == "SOFT_MAX"
        node = graph.node(node.sources[0])
    return None, softmax


def _same(graph: _Graph, address: int, routing: int) -> bool:
    return address == routing or graph.below_views(address) == graph.below_views(routing)
