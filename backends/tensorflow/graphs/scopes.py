"""The scopes of a graph's nodes, which rules name, as the code asked for them.

A gradient has the scope of its forward operation. For example, ``gradient_tape/dense_1/MatMul/MatMul`` differentiates
``dense_1/MatMul``; if the code asked for the scope ``dense``, the scope of both nodes is ``dense``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from polyamp.backends.tensorflow.graphs.graph import Graph, Node
from polyamp.backends.tensorflow.graphs.update import forward_of, is_gradient
from polyamp.backends.tensorflow.operations import OPERATIONS
from polyamp.backends.tensorflow.unstable import as_asked

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
