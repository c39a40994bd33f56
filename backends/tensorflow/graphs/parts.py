"""The parts of a training step (its backward pass, its update, its moving averages), and the scopes of its nodes.

The update and the averages keep state and are never lowered. Unscaling, clipping and the optimizer's arithmetic handle
numbers far smaller than float16 holds, and a moving average changes by so little that in 16 bits it would not change.

Rules name scopes as the code asked for them. A gradient has the scope of its forward operation. For example,
``gradient_tape/dense_1/MatMul/MatMul`` differentiates ``dense_1/MatMul``; if the code asked for the scope ``dense``,
the scope of both nodes is ``dense``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from polyamp.backends.tensorflow.graphs.graph import FLOATING, UPDATE_SCOPE, Graph, Node, closure, maker_name
from polyamp.backends.tensorflow.operations import OPERATIONS
from polyamp.backends.tensorflow.unstable import as_asked

_GRADIENT_SCOPE = re.compile(r"gradient_tape|gradients(_\d+)?")
_WRITES = re.compile(r"(Assign|ResourceApply|ResourceSparseApply|ResourceScatter|Apply|SparseApply|Scatter).*")
_FACTORS = ("Mul", "MulNoNan", "RealDiv", "Div")


class Parts(NamedTuple):
    """The parts of a training step in a graph."""

    update: set[str]  # names of the nodes that update trained variables
    # names of the nodes outside the update that are between a read and a write of the same variable
    averaging: set[str]
    averages: list[Node]  # the writes of moving averages: a variable's old value times a factor, plus something new
    # names of the nodes of the backward pass: those that compute gradients, and those that follow them
    backward: set[str]


def parts_of(graph: Graph, library: Mapping[str, Any]) -> Parts:
    """Return the parts of a step."""
    # These nodes are in the update: those in the scope of a wrapped optimizer; those that follow a gradient and that no
    # gradient follows; and those that follow reads of the update's own state, such as momentum.
    gradients = {node.name for node in graph.nodes if _computes_gradient(node, library)}
    marked = {node.name for node in graph.nodes if UPDATE_SCOPE in node.name.split("/")}
    consumers = graph.consumers()
    before = _reaching(graph, gradients | marked) - marked
    backward = _after(consumers, gradients)
    update = marked | (backward - gradients - before)
    while state := _state_reads(graph, update, before):
        update |= state | (_after(consumers, state) - gradients - before)
    update |= _sums_of_gradients(graph, update, consumers)
    paths = {
        node: _paths(graph, node, before, consumers)
        for node in graph.nodes
        if _writes_number(node) and node.name not in update
    }
    averages = [node for node, path in paths.items() if path and _is_average(node, path)]
    return Parts(update, {one.name for path in paths.values() for one in path}, averages, backward)


def is_gradient(name: str) -> bool:
    """Return whether a node belongs to the backward pass, by the scopes of ``tf.GradientTape`` and ``tf.gradients``."""
    return any(_GRADIENT_SCOPE.fullmatch(part) for part in name.split("/")[:-1])


def forward_of(name: str) -> str:
    """Return the forward operation that a node of the backward pass differentiates, by the node's scope."""
    parts: list[list[str]] = [[]]
    for one in name.split("/")[:-1]:
        if _GRADIENT_SCOPE.fullmatch(one):
            parts.append([])
        else:
            parts[-1].append(one.removesuffix("_grad"))
    return "/".join(next(filter(None, reversed(parts)), []))


def _computes_gradient(node: Node, library: Mapping[str, Any]) -> bool:
    """Return whether a node computes gradients. Its scope also has the lists that a loop fills for its gradient."""
    if is_gradient(node.name):
        return any(port.dtype in FLOATING for port in node.output_ports)
    attributes = node.definition.attr
    names = [attributes[key].func.name for key in ("f", "body", "then_branch") if key in attributes]
    return any("__backward_" in name or _returns_gradient(library.get(name)) for name in names)


def _returns_gradient(function: Any) -> bool:
    """Return whether the results of a ``FunctionDef`` are made from gradients."""
    if function is None:
        return False
    # A control input has no value.
    inputs = {one.name: [maker_name(text) for text in one.input if text[0] != "^"] for one in function.node_def}
    found = closure(map(maker_name, function.ret.values()), lambda name: inputs.get(name, []))
    return any(is_gradient(name) for name in found)


def _after(consumers: Mapping[str, list[Node]], start: Iterable[str]) -> set[str]:
    return closure(start, lambda name: (node.name for node in consumers[name]))


def _reaching(graph: Graph, goals: set[str]) -> set[str]:
    nodes = {node.name: node for node in graph.nodes} if goals else {}
    return closure(goals, lambda name: (node.name for node in _made_by(graph, nodes[name])))


def _made_by(graph: Graph, node: Node) -> list[Node]:
    return [graph.maker[value] for value in node.inputs if value in graph.maker]


def _state_reads(graph: Graph, update: set[str], before: set[str]) -> set[str]:
    """Return nodes that read variables which only the update uses, and that are not in the update yet."""
    writes = (node for node in graph.nodes if node.name in update and _WRITES.fullmatch(node.op))
    handles = {value for node in writes for value in node.inputs[:1]}
    if not handles:
        return set()
    own = handles - {value for node in graph.nodes if node.name in before for value in node.inputs}
    others = (node for node in graph.nodes if node.name not in update and node.name not in before)
    return {node.name for node in others if not own.isdisjoint(node.inputs)}


def _sums_of_gradients(graph: Graph, update: set[str], consumers: Mapping[str, list[Node]]) -> set[str]:
    """Return sums of one parameter's gradients. A parameter with many uses has many terms, too many for 16 bits."""
    sums = (node for node in graph.nodes if node.op in ("AddN", "AddV2", "Add") and is_gradient(node.name))
    return {
        node.name for node in sums if consumers[node.name] and all(one.name in update for one in consumers[node.name])
    }


def _writes_number(node: Node) -> bool:
    return node.op.startswith("Assign") and node.op.endswith("VariableOp") and node.input_ports[1].dtype in FLOATING


def _paths(graph: Graph, write: Node, before: set[str], consumers: Mapping[str, list[Node]]) -> list[Node]:
    """Return the nodes on paths from a variable's reads to a write of it that no gradient follows."""
    handle, value = write.inputs[:2]
    last = graph.maker.get(value)
    makers = closure(
        [last] if last else [],
        lambda node: (one for one in _made_by(graph, node) if one.name not in before),
    )
    reads = {node for node in makers if node.op == "ReadVariableOp" and node.inputs[0] == handle}
    return list(closure(reads, lambda node: makers.intersection(consumers[node.name])) - reads)


def _is_average(write: Node, path: Iterable[Node]) -> bool:
    return write.op != "AssignVariableOp" or any(node.op in _FACTORS for node in path)


_OPERATORS = {"RealDiv": "truediv", "FloorDiv": "floordiv", "FloorMod": "mod"}  # names that are not canonical
_DEFAULTS = {*OPERATIONS, "add", "sub", "mul", "neg", "pow", "matmul", "truediv", "while", "cond"}
_FORWARD_INPUT = {"AddN": 0, "FusedBatchNormGradV3": 3}  # the input that leads to a node with a scope


class Scopes:
    """The scopes of one graph's nodes."""

    def __init__(self, graph: Graph, path: str, traced: Any, others: Callable[[], Iterable[Scopes]]) -> None:
        self.path, self._graph, self._traced, self._others = path, graph, traced, others
        self._named = {node.name: node for node in graph.nodes}

    def path_of(self, node: Node) -> str:
        """Return the scopes of a node with its name."""
        return _within(self.path, as_asked(self._traced, node.name))

    def scope_of(self, node: Node) -> str:
        """Return the scopes of a node; for a gradient, those of its forward operation."""
        # A node's own name counts as a scope if somebody chose it, but not if it only repeats the operation.
        place = _FORWARD_INPUT.get(node.op)
        first = self._graph.maker.get(node.inputs[place]) if place is not None else None
        if node.op != "AddN" and first is not None and not is_gradient(node.name):
            return self.scope_of(first)  # the gradient of a norm that was replaced by a kernel
        if first is not None and is_gradient(first.name) and not is_gradient(node.name):
            return self.scope_of(first)  # a sum of gradients, which has no scope
        name = forward_of(node.name) if is_gradient(node.name) else node.name
        home, known = self._find(name)
        scopes, _, own = as_asked(home._traced, name if known is None else known.name).rpartition("/")
        is_chosen = own not in _DEFAULTS if known is None else not _repeats_operation(own, known.op)
        return _within(self.path, "/".join(filter(None, (scopes, own if is_chosen else ""))))

    def ruled_path(self, node: Node) -> str:
        """Return the path that rules match: rules for a forward operation also match its gradient."""
        # All gradients together can be named by their own scope, ``gradient_tape``.
        scope = self.scope_of(node)
        return f"gradient_tape/{scope}" if is_gradient(node.name) else scope

    def _node_at(self, name: str) -> Node | None:
        """Return the node of this name, or else the node in whose scope the name is."""
        while name and name not in self._named:
            name = name.rpartition("/")[0]
        return self._named.get(name)

    def _find(self, name: str) -> tuple[Scopes, Node | None]:
        """Find the node of a name in this graph, or in the forward function that it differentiates."""
        if (node := self._node_at(name)) is not None:
            return self, node
        home = next((one for one in self._others() if one.path == self.path and one._node_at(name)), self)
        return home, home._node_at(name)


def _within(path: str, name: str) -> str:
    """Return a name below a path. In the bodies of loops and branches, names may start with the path already."""
    return name if f"{name}/".startswith(f"{path}/") else "/".join(filter(None, (path, name)))


def _repeats_operation(name: str, op: str) -> bool:
    """Return whether a name is the one that TensorFlow chooses for an operation without a name."""
    return name.lower() in {op.lower(), op.lower().rstrip("v234"), OPERATIONS.get(op, ""), _OPERATORS.get(op)}
