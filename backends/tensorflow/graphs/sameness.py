"""Find which values of a graph are the same: a product of two values that are the same is a square.

For example, ``tf.reshape(x, [6]) * tf.reshape(tf.identity(x), [6])`` is a square, though its operands are two values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyamp.backends.tensorflow.graphs.graph import Graph, Node

_SAME = ("Identity", "StopGradient", "PreventGradient", "CheckNumerics", "EnsureShape", "Snapshot", "Real", "Conj")
_MOVES = ("Reshape", "Squeeze", "ExpandDims", "Transpose", "BroadcastTo", "Tile", "ConjugateTranspose", "Cast")


class Sameness:
    """A comparison of one graph's values, which looks through operations that only move them."""

    def __init__(self, graph: Graph, shape: Callable[[str], tuple[int, ...] | None] = lambda value: None) -> None:
        self._graph, self._shape = graph, shape
        self._keys: dict[str, Any] = {}

    def has_same_operands(self, node: Node) -> bool:
        """Return whether a node's two operands are the same value, also after the same moves, such as reshapes."""
        return len(node.inputs) == 2 and (node.inputs[0] == node.inputs[1] or self._are_same(*node.inputs))

    def divides_again(self, node: Node) -> bool:
        """Return whether a node divides a quotient by its denominator again, like the derivative ``-x / y / y``."""
        # Such a value is as large as a reciprocal of ``y``. It is not a gradient, so no loss scale brings it into
        # range.
        before = self._graph.maker.get(node.inputs[0])
        is_quotient = node.op == "RealDiv" and before is not None and before.op == "RealDiv"
        return is_quotient and before is not None and self._are_same(before.inputs[1], node.inputs[1])

    def _are_same(self, one: str, other: str) -> bool:
        return self._key(one) == self._key(other)

    def _key(self, value: str) -> Any:
        if value not in self._keys:
            self._keys[value] = self._new_key(value)
        return self._keys[value]

    def _new_key(self, value: str) -> Any:
        node = self._graph.maker.get(value)
        if node is None:
            return value
        if node.op in _SAME and len(node.outputs) == 1:
            return self._key(node.inputs[0])
        if node.op == "IdentityN":
            return self._key(node.inputs[node.outputs.index(value)])
        if node.op == "Const":
            return ("Const", node.definition.attr["value"].tensor.SerializeToString())
        if node.op == "Reshape" and self._keeps_shape(node):
            return self._key(node.inputs[0])
        if node.op in _MOVES:
            attributes = sorted((name, text.SerializeToString()) for name, text in node.definition.attr.items())
            inputs = tuple(map(self._key, node.inputs))
            return (node.op, *inputs, *((name, text) for name, text in attributes if not name.startswith("_")))
        if node.op in ("Shape", "Pack"):
            return (node.op, *map(self._key, node.inputs))
        return value

    def _keeps_shape(self, node: Node) -> bool:
        before, after = self._shape(node.inputs[0]), self._shape(node.outputs[0])
        return before is not None and before == after
