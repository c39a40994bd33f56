"""The types and states of a graph's values and lists while it is decided; and which values are equal, or constants.

A state follows from a value's origin. For example, in ``tf.cast(ids, tf.float32) * 0.5`` the cast makes an ``input``,
because the integers are the user's data, and 0.5 is a ``weak`` constant, which float16 can hold.

A list of tensors, such as a ``TensorArray``, has one type, and all nodes that use it name this type. It follows from
the values that are put into the list, and these are known only after the pass over a graph. So the pass is repeated: in
the first, every list holds strong float32 values; in the next, each list holds the values that the pass before put into
it.

Equal values have equal numbers. ``tf.reshape(x, [6]) * tf.reshape(tf.identity(x), [6])`` is a square, though its
operands are two values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from polyamp.backends.tensorflow.graphs.graph import FLOAT32, FLOATING, READS, Graph, Node
from polyamp.backends.tensorflow.operations import OPERATIONS
from polyamp.flow import CARRIED, INPUT, WEAK, Value, largest_integer
from polyamp.numbering import Numbering
from polyamp.plan import Decider

VARIANT: int = tf.variant.as_datatype_enum
MOVING = ("AddN", "Identity", "TensorListResize", "ZerosLike")
"""Operations that return their input list, or one of the same type."""

CREATING = ("EmptyTensorList", "TensorListFromTensor", "TensorListReserve")
_MEASURING = ("TensorListElementShape", "TensorListLength")
_USING = (
    "TensorListGather",
    "TensorListGetItem",
    "TensorListPopBack",
    "TensorListPushBack",
    "TensorListSetItem",
    "TensorListStack",
)
HANDLED = frozenset({*MOVING, *CREATING, *_MEASURING, *_USING})
_STRONG = Value("strong", "tensor_list")


class Lists:
    """The contents of a program's lists, by name. A list is named after the node that makes it."""

    def __init__(self) -> None:
        self._same: dict[str, str] = {}
        self._items: dict[str, set[Value]] = {}
        self._known: dict[str, Value] = {}
        self._kept: set[str] = set()
        self._taken: dict[str, bool] = {}
        self._narrow: set[str] = set()

    def is_low(self, name: str) -> bool:
        """Return whether a list has 16-bit items: if the values are low, or each use takes items in 16 bits."""
        return self.value_of(name).state == "low" or self._root(name) in self._narrow

    def take(self, name: str, *, is_low: bool) -> None:
        """Record that a node takes an item of a list, in 16 bits or not."""
        self._taken[name] = is_low and self._taken.get(name, True)

    def value_of(self, name: str) -> Value:
        """Return the state of a list's items, which the pass before found."""
        return self._known.get(self._root(name), _STRONG)

    def put(self, name: str, value: Value) -> None:
        """Record that a value is put into a list."""
        if name:
            self._items.setdefault(name, set()).add(value._replace(role=""))

    def keep(self, names: Iterable[str]) -> None:
        """Record that lists must hold float32."""
        for name in filter(None, names):
            self.put(name, _STRONG)
            self._kept.add(name)

    def tie(self, names: Iterable[str]) -> str:
        """Record that lists have one type, and return one name for all; if any list is unknown, all keep float32."""
        first, *others = (self._root(name) for name in names)
        if "" in (first, *others):
            self.keep((first, *others))
            return ""
        for other in others:
            if other != first:
                self._same[other] = first
        return first

    def settle(self) -> bool:
        """Start the next pass with the values that were put into lists, and return whether anything changed."""
        items: dict[str, set[Value]] = {}
        for name, values in self._items.items():
            items.setdefault(self._root(name), set()).update(values)
        known = {name: _joined(values) for name, values in items.items()}
        kept = {self._root(name) for name in self._kept}
        wide = {self._root(name) for name, is_low in self._taken.items() if not is_low}
        narrow = {self._root(name) for name in self._taken} - wide - kept
        before = (self._known, self._narrow)
        self._known, self._narrow, self._items, self._taken = known, narrow, {}, {}
        is_same = before == (known, narrow)
        return not is_same and (bool(narrow) or any(value != _STRONG for value in known.values()))

    def _root(self, name: str) -> str:
        while name in self._same:
            name = self._same[name]
        return name


def _joined(values: Iterable[Value]) -> Value:
    states = {"strong" if value.unfit else value.state for value in values}
    if states <= {"low", "weak"} and "low" in states:
        return Value("low", min(value.maker for value in values if value.state == "low"))
    if states <= {"weak", "input"}:
        return Value("input" if "input" in states else "weak")
    return _STRONG


def is_item(node: Node, port: Any) -> bool:
    """Return whether an input or output of a node is one float32 item of a list, or all of them."""
    return port.dtype == FLOAT32 and port.attribute == "element_dtype"


def is_list(node: Node) -> bool:
    """Return whether a node makes, fills, reads or moves a list of tensors."""
    return node.op in HANDLED and VARIANT in {port.dtype for port in (*node.input_ports, *node.output_ports)}


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
    as_divisor: Value | None = None  # the state of a captured constant if something is divided by it
    largest: float = math.inf  # how large its integers may be


KNOWN_CARRIED = Known(FLOAT32, CARRIED)
"""The facts about a value that a loop carries in float32."""


def value_of_type(dtype: int) -> Value:
    """Return the state of a program's argument, or of data that the program reads, by the type alone."""
    # Integers are an ``input`` too, for the values that are made from them.
    if dtype in FLOATING and dtype != FLOAT32:
        return Value("other", tf.as_dtype(dtype).name)
    return INPUT if is_number(dtype) else WEAK


@functools.cache
def is_number(dtype: int) -> bool:
    """Return whether values of a type are numbers, and neither booleans nor handles."""
    kind = tf.as_dtype(dtype % 100)
    return bool(kind.is_floating or kind.is_integer or kind.is_complex)


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


def value_of_cast(node: Node, known: Value, maker: Node | None, decider: Decider, largest: float) -> Value:
    """Return the state of float32 values cast from integers, which are at most ``largest``, or from booleans."""
    if node.input_ports[0].dtype == BOOL:
        return WEAK
    if maker is not None and maker.op == "Const":
        return decider.table(tf.make_ndarray(maker.definition.attr["value"].tensor))
    return decider.integers(INPUT if known.state == "input" else WEAK, largest)


class Integers:
    """How large the integers in the values of a graph can be; 0 for sizes and scalars, which are like constants."""

    def __init__(self, graph: Graph, known: Mapping[str, Known]) -> None:
        self._graph, self._known, self._largest = graph, known, dict[str, float]()

    def largest(self, value: str) -> float:
        """Return how large the integers of a value can be."""
        if value not in self._largest:
            maker = self._graph.maker.get(value)
            self._largest[value] = math.inf  # until it is known: a loop comes back to it
            self._largest[value] = self._known[value].largest if maker is None else self._made(maker, value)
        return self._largest[value]

    def _made(self, node: Node, value: str) -> float:
        port = node.output_ports[node.outputs.index(value)]
        operation, kind = OPERATIONS.get(node.op, node.op), tf.as_dtype(port.dtype % 100)
        limit = float(kind.max) if kind.is_integer else 1 if kind.is_bool else math.inf
        if node.op == "Const":
            return _largest_in_array(tf.make_ndarray(node.definition.attr["value"].tensor))
        if node.op == "Range":
            makers = [self._graph.maker.get(one) for one in node.inputs]
            ends = [one.definition.attr["value"].tensor for one in makers if one is not None and one.op == "Const"]
            return float(max(abs(tf.make_ndarray(end)) for end in ends)) if len(ends) == len(makers) else limit
        if operation in ("shape", "one_hot"):
            return 0
        pairs = zip(node.inputs, node.input_ports, strict=True)
        moved = [one for one, of in pairs if operation == "cast" or of.attribute == port.attribute]
        return largest_integer(operation, list(map(self.largest, moved)), limit)


def _largest_in_array(array: Any) -> float:
    return float(np.abs(array.astype(float)).max()) if array.size > 1 else 0


def numbers_in(graph: Graph, node: Node) -> list[float]:
    """Return the floating numbers among a node's operands."""
    makers = [graph.maker[value] for value in node.inputs if value in graph.maker]
    tensors = [maker.definition.attr["value"].tensor for maker in makers if maker.op == "Const"]
    scalars = [tensor for tensor in tensors if tensor.dtype == FLOAT32 and not tensor.tensor_shape.dim]
    return [tf.make_ndarray(tensor).item() for tensor in scalars]


def capture(dtype: int, tensor: Any, variable: Any, decider: Decider) -> Known:
    """Return the facts about a value that a function captured: a tensor, or the handle of a variable."""
    if variable is not None:
        return Known(dtype, _value_of_variable(variable, decider))
    if getattr(tensor, "dtype", tf.variant) in (tf.resource, tf.variant):
        return Known(dtype)
    if not hasattr(tensor, "numpy"):
        return Known(dtype, value_of_type(dtype))
    if dtype != FLOAT32:
        known = Known(dtype, value_of_type(dtype) if dtype in FLOATING else WEAK, is_constant=True)
        return known._replace(largest=_largest_in_array(tensor.numpy())) if tensor.dtype.is_integer else known
    array = tensor.numpy()
    return Known(dtype, decider.table(array), is_constant=True, as_divisor=decider.table(array, divides=True))


def _value_of_variable(variable: Any, decider: Decider) -> Value:
    with tf.init_scope():
        if not tf.executing_eagerly() or variable.dtype != tf.float32 or not variable.is_initialized():
            return WEAK
        return decider.parameter(max(float(tf.reduce_max(variable)), -float(tf.reduce_min(variable))))


_MOVED = ("DeepCopy", "Identity", "Snapshot")
_CHECKED = ("CheckNumerics", "EnsureShape", "PreventGradient", "StopGradient")
"""Operations that return what they take, and do more than this, so a cast of their input cannot stand for theirs."""


def numbered(
    graph: Graph, known: Mapping[str, Known], shape: Callable[[str], tuple[int, ...] | None]
) -> tuple[Numbering, dict[str, int]]:
    """Give equal values of a graph equal numbers; return the numbering, and the numbers by value."""
    numbering = Numbering()
    reshapes = [node for node in graph.nodes if OPERATIONS.get(node.op) == "reshape"]
    shapes = {value: shape(value) for node in reshapes for value in (node.inputs[0], *node.outputs)}
    numbers = {name: numbering.new(shapes.get(name), is_constant=one.is_constant) for name, one in known.items()}
    closing = numbering.new()  # of the edge that closes a loop
    for node in graph.nodes:
        inputs = [numbers.get(value, closing) for value in node.inputs]
        for place, value in enumerate(node.outputs):
            numbers[value] = _number(numbering, node, place, inputs, shapes.get(value))
    return numbering, numbers


def _number(numbering: Numbering, node: Node, place: int, inputs: Sequence[int], shape: tuple[int, ...] | None) -> int:
    if node.op == "IdentityN":
        return numbering.of("identity", [inputs[place]])
    is_same = node.is_pure and node.op != "Merge" and not reads_data(node)
    if not is_same and node.op not in (*READS, *_CHECKED):
        return numbering.new(shape)
    attributes = (node.op, place, node.definition.device, *sorted(node.controls), *_attributes(node))
    name = OPERATIONS.get(node.op, node.op)
    if name == "shape" or node.op in ("OnesLike", "ZerosLike"):  # data do not change it
        return numbering.of("constant", [], (attributes, *inputs), shape)
    if node.op in (*_CHECKED, *_MOVED):
        is_moved = node.op in _MOVED and not node.controls
        return numbering.of("identity" if is_moved else "stop_gradient", inputs, attributes, shape)
    if name == "reshape" and shape is not None:
        inputs = inputs[:1]
    return numbering.of(name, inputs, attributes, shape)


def _attributes(node: Node) -> Iterator[Hashable]:
    for name, value in sorted(node.definition.attr.items()):
        if not name.startswith("_"):
            yield name
            yield value.SerializeToString()
