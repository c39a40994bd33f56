"""The types and states of a graph's values while it is decided, and which of them are constants.

A state follows from a value's origin. For example, in ``tf.cast(ids, tf.float32) * 0.5`` the cast makes an ``input``,
because the integers are the user's data, and 0.5 is a ``weak`` constant, which float16 can hold.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from polyamp.backends.tensorflow.graphs.graph import FLOAT32, FLOATING, Node
from polyamp.backends.tensorflow.operations import OPERATIONS
from polyamp.deciding import Decider
from polyamp.flow import CARRIED, INPUT, WEAK, Value, magnitude
from polyamp.operations import OPERATIONS as TABLE

BOOL: int = tf.bool.as_datatype_enum
_RESOURCES = (tf.resource.as_datatype_enum, tf.variant.as_datatype_enum)
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


class Known(NamedTuple):
    """The type and state of one value of the rewritten graph."""

    dtype: int  # its type there. A low value may still be in float32
    value: Value = WEAK  # its state for the flow rule
    is_constant: bool = False  # whether it is the same in every call
    held: str = ""  # for a list of tensors, its name in `Lists`


KNOWN_CARRIED = Known(FLOAT32, CARRIED)
"""The facts about a value that a loop carries in float32."""


def value_of_type(dtype: int) -> Value:
    """Return the state of an argument of the program, or of data that it reads, which follows from its type alone."""
    # Integers are an ``input`` too, for the values that are made from them.
    if dtype in FLOATING and dtype != FLOAT32:
        return Value("other", tf.as_dtype(dtype).name)
    return INPUT if is_number(dtype) else WEAK


@functools.cache
def is_number(dtype: int) -> bool:
    """Return whether values of a type are numbers, and neither booleans nor handles."""
    kind = tf.as_dtype(dtype % 100)
    return bool(kind.is_floating or kind.is_integer or kind.is_complex)


def is_constant(node: Node, constants: Mapping[str, bool]) -> bool:
    """Return whether a node's outputs are the same in every call."""
    if node.op in _CONSTANTS:
        return True
    entry = TABLE.get(OPERATIONS.get(node.op, ""))
    is_pure = entry is not None and (entry.op_class != "keep" or node.op == "Cast")
    return is_pure and bool(node.inputs) and all(constants.get(value, False) for value in node.inputs)


def reads_data(node: Node) -> bool:
    """Return whether a node's outputs come from outside the program, such as the elements of a dataset."""
    return node.op.startswith(_DATA)


def value_of_integers(node: Node, values: Mapping[str, Value]) -> Value:
    """Return the state of the integers that a node returns: ``input`` unless they are sizes or constants."""
    if OPERATIONS.get(node.op) == "shape" or node.op in _CONSTANTS or node.op.startswith("TensorList"):
        return WEAK
    made_of = [
        values[value].state == "input" if port.dtype % 100 not in FLOATING else True
        for value, port in zip(node.inputs, node.input_ports, strict=True)
        if value in values and port.dtype not in (BOOL, *_RESOURCES)
    ]
    return INPUT if any(made_of) or reads_data(node) else WEAK


def value_of_cast(node: Node, known: Value, maker: Node | None, decider: Decider) -> Value:
    """Return the state of float32 values that a cast makes from integers or booleans."""
    if node.input_ports[0].dtype == BOOL:
        return WEAK
    if maker is not None and maker.op == "Const":
        return decider.constant(magnitude(tf.make_ndarray(maker.definition.attr["value"].tensor)))
    return INPUT if known.state == "input" else WEAK


def value_of_capture(tensor: Any, decider: Decider) -> tuple[Value, bool]:
    """Return the state of a value that a function captured, and whether it is the same in every call."""
    dtype = getattr(tensor, "dtype", None)
    if dtype is None or dtype in (tf.resource, tf.variant):
        return WEAK, False
    if not hasattr(tensor, "numpy"):
        return value_of_type(dtype.as_datatype_enum), False
    return (decider.constant(magnitude(tensor.numpy())), True) if dtype == tf.float32 else (_other(dtype), True)


def _other(dtype: Any) -> Value:
    return Value("other", dtype.name) if dtype.as_datatype_enum in FLOATING else WEAK
