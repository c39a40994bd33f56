"""What the operands of a node are, beyond their types: constants, the same value twice, integers made of data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.graphs.graph import FLOAT32, FLOATING, Graph, Node
from polyamp.backends.tensorflow.operations import OPERATIONS
from polyamp.flow import Value, constant
from polyamp.operations import OPERATIONS as TABLE
from polyamp.values import magnitude

BOOL: int = tf.bool.as_datatype_enum
_RESOURCES = (tf.resource.as_datatype_enum, tf.variant.as_datatype_enum)
_SAME = ("Identity", "StopGradient", "PreventGradient", "CheckNumerics", "EnsureShape", "Snapshot", "Real", "Conj")
_MOVES = ("Reshape", "Squeeze", "ExpandDims", "Transpose", "BroadcastTo", "Tile", "ConjugateTranspose", "Cast")
_CONSTANTS = ("Const", "OnesLike", "ZerosLike")
_DATA = (
    "Iterator",
    "Optional",
    "Placeholder",
    "Parse",
    "Decode",
    "Example",
    "Queue",
    "ReadVariable",
    "Unstage",
    "Recv",
)


class Operands:
    """The operands of one graph's nodes.

    >>> from polyamp.backends.tensorflow.graphs.graph import Graph
    >>> with tf.Graph().as_default() as graph:
    ...     x = tf.ones((2, 3))
    ...     product = tf.reshape(x, (6,)) * tf.reshape(tf.identity(x), (6,))
    >>> typed = Graph(graph.as_graph_def().node, {})
    >>> Operands(typed).are_same(typed.maker[product.op.name])
    True

    Args:
        graph: the graph.
        shape: the shape of a value where it is known, else None.
    """

    def __init__(self, graph: Graph, shape: Callable[[str], tuple[int, ...] | None] = lambda value: None) -> None:
        self._graph, self._shape = graph, shape
        self._keys: dict[str, Any] = {}

    def are_same(self, node: Node) -> bool:
        """Return whether a node's two operands are one value, seen through what moves both of them alike."""
        return len(node.inputs) == 2 and (node.inputs[0] == node.inputs[1] or self._are_moved_alike(*node.inputs))

    def divides_again(self, node: Node) -> bool:
        """Return whether a node divides a quotient by its denominator again, as the derivative ``-x / y / y`` does.

        It is as large as a reciprocal of ``y``, and is not a gradient, so that no loss scale brings it into range.
        """
        before = self._graph.maker.get(node.inputs[0])
        is_quotient = node.op == "RealDiv" and before is not None and before.op == "RealDiv"
        return is_quotient and before is not None and self._are_moved_alike(before.inputs[1], node.inputs[1])

    def _are_moved_alike(self, one: str, other: str) -> bool:
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


def is_constant(node: Node, constants: Mapping[str, bool]) -> bool:
    """Return whether what a node gives is the same in every call.

    Args:
        node: the node.
        constants: what was found of the values that it takes.
    """
    if node.op in _CONSTANTS:
        return True
    entry = TABLE.get(OPERATIONS.get(node.op, ""))
    is_pure = entry is not None and (entry.op_class != "keep" or node.op == "Cast")
    return is_pure and bool(node.inputs) and all(constants.get(value, False) for value in node.inputs)


def given(dtype: int) -> Value:
    """Return what is known of an argument of the program, or of what it reads, by its type alone.

    An integer that is one is known as an ``input`` too, for what is made of it.
    """
    if dtype in FLOATING and dtype != FLOAT32:
        return Value("other", tf.as_dtype(dtype).name)
    return Value("input") if is_number(dtype) else Value()


@functools.cache
def is_number(dtype: int) -> bool:
    """Return whether values of a type are numbers, and neither booleans nor handles."""
    kind = tf.as_dtype(dtype % 100)
    return bool(kind.is_floating or kind.is_integer or kind.is_complex)


def reads_data(node: Node) -> bool:
    """Return whether a node gives what comes from outside of the program, such as the elements of a dataset."""
    return node.op.startswith(_DATA)


def integers(node: Node, values: Mapping[str, Value]) -> Value:
    """Return what is known of the integers that a node gives: ``input`` unless they are sizes or constants."""
    if OPERATIONS.get(node.op) == "shape" or node.op in _CONSTANTS or node.op.startswith("TensorList"):
        return Value()
    made_of = [
        values[value].state == "input" if port.dtype % 100 not in FLOATING else True
        for value, port in zip(node.inputs, node.takes, strict=True)
        if value in values and port.dtype not in (BOOL, *_RESOURCES)
    ]
    return Value("input") if any(made_of) or reads_data(node) else Value()


def of_integers(node: Node, known: Value, maker: Node | None, compute: str) -> Value:
    """Return what is known of float32 values that a cast makes of other types.

    Args:
        node: the cast.
        known: what is known of what it casts.
        maker: the node that gave that.
        compute: the format of ``lower`` operations.
    """
    if node.takes[0].dtype == BOOL:
        return Value()
    if maker is not None and maker.op == "Const":
        return constant([magnitude(tf.make_ndarray(maker.definition.attr["value"].tensor))], compute)
    return Value("input") if known.state == "input" else Value()


def captured(tensor: Any, compute: str) -> tuple[Value, bool]:
    """Return what is known of a value that a function captured, and whether it is the same in every call.

    Args:
        tensor: an eager tensor, whose value is known; a symbolic one, which is data; or a variable's handle.
        compute: the format of ``lower`` operations.
    """
    dtype = getattr(tensor, "dtype", None)
    if dtype is None or dtype in (tf.resource, tf.variant):
        return Value(), False
    if not hasattr(tensor, "numpy"):
        return given(dtype.as_datatype_enum), False
    return (constant([magnitude(tensor.numpy())], compute), True) if dtype == tf.float32 else (_other(dtype), True)


def _other(dtype: Any) -> Value:
    return Value("other", dtype.name) if dtype.as_datatype_enum in FLOATING else Value()
