"""The types of lists of tensors, such as a ``TensorArray``, which loops fill and read.

A list has one type, and all nodes that use it name this type. It follows from the values that are put into the list,
and these are known only after the pass over a graph. So the pass is repeated: in the first, every list holds strong
float32 values; in the next, each list holds the values that the pass before put into it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.graphs.graph import FLOAT32, Node
from polyamp.flow import Value

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
        """Return whether a list has 16-bit items: its values are low, or every use takes them in 16 bits."""
        return self.value_of(name).state == "low" or self._root(name) in self._narrow

    def take(self, name: str, *, is_low: bool) -> None:
        """Record that a node takes an item, in 16 bits or not."""
        self._taken[name] = is_low and self._taken.get(name, True)

    def value_of(self, name: str) -> Value:
        """Return the state of a list's items, which the pass before found."""
        return self._known.get(self._root(name), _STRONG)

    def put(self, name: str, value: Value) -> None:
        """Record that a value is put into a list."""
        if name:
            self._items.setdefault(name, set()).add(value._replace(role=""))

    def sum(self, name: str) -> None:
        """Record that lists are added: as long as their items are float32, this use takes float32."""
        self.take(name, is_low=False)

    def keep(self, names: Iterable[str]) -> None:
        """Record that lists must hold float32."""
        for name in filter(None, names):
            self.put(name, _STRONG)
            self._kept.add(name)

    def tie(self, names: Iterable[str]) -> str:
        """Record that lists have the same type, and return one name for them; if one is unknown, all keep float32."""
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


def holds_float32(node: Node) -> bool:
    """Return whether a node names a float32 list."""
    return "element_dtype" in node.definition.attr and node.definition.attr["element_dtype"].type == FLOAT32


def is_list(node: Node) -> bool:
    """Return whether a node makes, fills, reads or moves a list of tensors."""
    return node.op in HANDLED and VARIANT in {port.dtype for port in (*node.input_ports, *node.output_ports)}
