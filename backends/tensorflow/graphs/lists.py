"""The lists of tensors that loops fill and read, such as a ``TensorArray``: what they hold decides their type.

A list has one type, which all nodes that use it name. What is put into it is known only after the pass over a graph, so
the pass is repeated: at first every list holds float32 values by need, then each what was put into it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.graphs.graph import FLOAT32, Node
from polyamp.flow import Value

VARIANT: int = tf.variant.as_datatype_enum
MOVING = ("AddN", "Identity", "TensorListResize", "ZerosLike")
"""Operations that give the list that they take, or one of the same type."""

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
    """What the lists of a program hold, by names that are given to where lists are made.

    >>> lists = Lists()
    >>> lists.value_of("array").state
    'strong'
    >>> lists.put("array", Value("low", "matmul"))
    >>> lists.settle(), lists.value_of("array")
    (True, Value(state='low', maker='matmul', unfit='', role=''))
    """

    def __init__(self) -> None:
        self._same: dict[str, str] = {}
        self._items: dict[str, set[Value]] = {}
        self._known: dict[str, Value] = {}
        self._kept: set[str] = set()
        self._taken: dict[str, bool] = {}
        self._narrow: set[str] = set()

    def is_low(self, name: str) -> bool:
        """Return whether a list has 16-bit items: low ones, or such as nothing takes but in 16 bits."""
        return self.value_of(name).state == "low" or self._root(name) in self._narrow

    def take(self, name: str, *, is_low: bool) -> None:
        """Note that an item is taken, in 16 bits or not."""
        self._taken[name] = is_low and self._taken.get(name, True)

    def value_of(self, name: str) -> Value:
        """Return what is known of a list's items, from the pass before."""
        return self._known.get(self._root(name), _STRONG)

    def put(self, name: str, value: Value) -> None:
        """Note what is put into a list."""
        if name:
            self._items.setdefault(name, set()).add(value._replace(role=""))

    def sum(self, name: str) -> None:
        """Note that lists are added: where their items are float32, nothing but that is taken."""
        self.take(name, is_low=False)

    def keep(self, names: Iterable[str]) -> None:
        """Note that lists have to hold float32."""
        for name in filter(None, names):
            self.put(name, _STRONG)
            self._kept.add(name)

    def tie(self, names: Iterable[str]) -> str:
        """Note that lists have one type, and return a name for them; one that is not known here keeps float32."""
        first, *others = (self._root(name) for name in names)
        if "" in (first, *others):
            self.keep((first, *others))
            return ""
        for other in others:
            if other != first:
                self._same[other] = first
        return first

    def settle(self) -> bool:
        """Take what was put into lists for what they hold; return whether anything changed."""
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
    """Return whether what a node takes or gives is a list's float32 item, or all of them."""
    return port.dtype == FLOAT32 and port.attribute == "element_dtype"


def holds_float32(node: Node) -> bool:
    """Return whether a node names a list of float32."""
    return "element_dtype" in node.definition.attr and node.definition.attr["element_dtype"].type == FLOAT32
