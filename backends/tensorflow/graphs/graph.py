"""A typed graph: the nodes of a ``GraphDef`` or of a function's body, each with the types of what it takes and gives.

A value is named by the text that refers to it: ``node`` or ``node:1`` in a ``GraphDef``, ``node:output:0`` or an
argument's name in a function.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from polyamp.backends.tensorflow.unstable import operation_definition

NodeDef = tf.compat.v1.NodeDef
FLOAT32: int = tf.float32.as_datatype_enum
FLOATING: frozenset[int] = frozenset(
    kind.as_datatype_enum for kind in (tf.float32, tf.float16, tf.bfloat16, tf.float64, tf.complex64, tf.complex128)
)


class Port(NamedTuple):
    """One value that a node takes or gives.

    Attributes:
        dtype: a number of TensorFlow's ``DataType``; those above 100 are references to variables.
        attribute: the type attribute of the node that says so; empty where the operation fixes it.
        position: where in that attribute, if it is a list.
    """

    dtype: int
    attribute: str = ""
    position: int | None = None


class Node:
    """One node, taken apart.

    Attributes:
        definition: its ``NodeDef``; not changed.
        inputs: names of the values that it takes, without control inputs.
        outputs: names of the values that it gives.
        takes: a `Port` for each input.
        gives: a `Port` for each output.
    """

    __slots__ = ("controls", "definition", "gives", "inputs", "name", "op", "outputs", "takes")

    def __init__(self, definition: Any, operation: Any, *, in_function: bool) -> None:
        self.definition, self.name, self.op = definition, definition.name, definition.op
        self.inputs = [_plain(text) for text in definition.input if not text.startswith("^")]
        self.controls = [text[1:] for text in definition.input if text.startswith("^")]
        if operation is None:  # a call of a function by its name, as graphs of TensorFlow 1 have them
            self.takes, self.gives, self.outputs = [Port(0)] * len(self.inputs), [], []
            return
        attributes = definition.attr
        self.takes = [port for arg in operation.input_arg for port in _ports(arg, attributes, operation)]
        given = [_ports(arg, attributes, operation) for arg in operation.output_arg]
        self.gives = [port for ports in given for port in ports]
        if in_function:
            names = ((arg.name, len(ports)) for arg, ports in zip(operation.output_arg, given, strict=True))
            self.outputs = [f"{self.name}:{name}:{index}" for name, count in names for index in range(count)]
        else:
            self.outputs = [f"{self.name}:{index}" if index else self.name for index in range(len(self.gives))]


class Graph:
    """Nodes in an order in which every value comes before its uses, but for the edge that closes a loop.

    Attributes:
        nodes: in that order.
        arguments: of a function: name and type of each argument.
        returns: of a function: the value of each result, in order.
        maker: the node that gives a value; arguments have none.
        instead: of nodes that stand for others: the bytes that those moved.
    """

    def __init__(
        self,
        definitions: Iterable[Any],
        library: Mapping[str, Any],
        signature: Any = None,
        returned: Mapping[str, str] | None = None,
    ) -> None:
        self.in_function = signature is not None
        self.instead: Mapping[str, int] = {}
        self.arguments = [(arg.name, arg.type) for arg in signature.input_arg] if signature else []
        self.results = [(arg.name, arg.type) for arg in signature.output_arg] if signature else []
        self.returns = [_plain((returned or {})[name]) for name, _ in self.results]
        self._take(definitions, library)

    def _take(self, definitions: Iterable[Any], library: Mapping[str, Any]) -> None:
        nodes = [
            Node(definition, operation_definition(definition.op, library), in_function=self.in_function)
            for definition in definitions
        ]
        self.maker = {value: node for node in nodes for value in node.outputs}
        self.nodes = _ordered(nodes, self.maker)

    @classmethod
    def of_function(cls, function: Any, library: Mapping[str, Any]) -> Graph:
        """The body of a ``FunctionDef``."""
        return cls(function.node_def, library, function.signature, dict(function.ret))

    def replaced(
        self,
        definitions: Iterable[Any],
        library: Mapping[str, Any],
        moved: Mapping[str, str],
        instead: Mapping[str, int],
    ) -> Graph:
        """Return the graph with other nodes.

        Args:
            definitions: ``NodeDef`` of all of them, which may still take values by the names that they had.
            library: ``FunctionDef`` by name.
            moved: names that values have now.
            instead: see `Graph`.
        """
        new = copy.copy(self)
        new.returns = [moved.get(value, value) for value in self.returns]
        new.instead = instead
        new._take([_taking(definition, moved) for definition in definitions], library)
        return new

    def consumers(self) -> dict[str, list[Node]]:
        """The nodes that take each node's values, by its name."""
        found: dict[str, list[Node]] = {node.name: [] for node in self.nodes}
        for node in self.nodes:
            for name in {self.maker[value].name for value in node.inputs if value in self.maker}:
                found[name].append(node)
        return found


def closes_loop(node: Node) -> bool:
    """Whether a node of TensorFlow 1's control flow hands a loop's value to its next turn."""
    return node.op in ("NextIteration", "RefNextIteration")


def _taking(definition: Any, moved: Mapping[str, str]) -> Any:
    if moved.keys().isdisjoint(definition.input):
        return definition
    new = NodeDef()
    new.CopyFrom(definition)
    new.input[:] = [moved.get(text, text) for text in definition.input]
    return new


def _ports(arg: Any, attributes: Any, operation: Any) -> list[Port]:
    if arg.type_list_attr:
        listed = _attribute(attributes, arg.type_list_attr, operation).list.type
        return [Port(dtype, arg.type_list_attr, index) for index, dtype in enumerate(listed)]
    dtype = arg.type or _attribute(attributes, arg.type_attr, operation).type
    count = _attribute(attributes, arg.number_attr, operation).i if arg.number_attr else 1
    return [Port(dtype + 100 if arg.is_ref and dtype < 100 else dtype, arg.type_attr)] * count


def _attribute(attributes: Any, name: str, operation: Any) -> Any:
    if name in attributes:
        return attributes[name]
    return next(attr.default_value for attr in operation.attr if attr.name == name)  # left out where it is the default


def _plain(value: str) -> str:
    """``node:0`` is ``node``; in a function, where names have three parts, nothing changes."""
    return value[:-2] if value.endswith(":0") and value.count(":") == 1 else value


def _ordered(nodes: list[Node], maker: Mapping[str, Node]) -> list[Node]:
    """Depth first along inputs, so that the order of nodes that do not depend on each other is kept."""
    ordered: list[Node] = []
    done: set[str] = set()
    for root in nodes:
        pending = [root]
        while pending:
            node = pending[-1]
            before = [] if node.name in done else _before(node, maker, done)
            if before:
                pending.extend(before)
                continue
            pending.pop()
            if node.name not in done:
                done.add(node.name)
                ordered.append(node)
    return ordered


def _before(node: Node, maker: Mapping[str, Node], done: set[str]) -> list[Node]:
    """The makers of a node's inputs that are not done, but for the edge that closes a loop."""
    makers = [maker[value] for value in node.inputs if value in maker]
    return [made for made in makers if made.name not in done and not closes_loop(made)]
