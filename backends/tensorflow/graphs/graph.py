"""A typed graph: the nodes of a ``GraphDef`` or of a function's body, with the types of their inputs and outputs.

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
    """One input or output of a node."""

    dtype: int  # a number of TensorFlow's ``DataType``; those above 100 are references to variables
    attribute: str = ""  # the type attribute of the node that sets the type; empty if the operation fixes it
    position: int | None = None  # the position in that attribute, if it is a list


class Node:
    """One node with its typed inputs and outputs."""

    __slots__ = ("controls", "definition", "input_ports", "inputs", "name", "op", "output_ports", "outputs")

    def __init__(self, definition: Any, operation: Any, *, in_function: bool) -> None:
        self.definition, self.name, self.op = definition, definition.name, definition.op
        self.inputs = [_plain(text) for text in definition.input if not text.startswith("^")]
        self.controls = [text[1:] for text in definition.input if text.startswith("^")]
        if operation is None:  # a call of a function by its name, as graphs of TensorFlow 1 have them
            self.input_ports, self.output_ports, self.outputs = [Port(0)] * len(self.inputs), [], []
            return
        attributes = definition.attr
        self.input_ports = [port for arg in operation.input_arg for port in _ports(arg, attributes, operation)]
        of_args = [_ports(arg, attributes, operation) for arg in operation.output_arg]
        self.output_ports = [port for ports in of_args for port in ports]
        if in_function:
            names = ((arg.name, len(ports)) for arg, ports in zip(operation.output_arg, of_args, strict=True))
            self.outputs = [f"{self.name}:{name}:{index}" for name, count in names for index in range(count)]
        else:
            self.outputs = [f"{self.name}:{index}" if index else self.name for index in range(len(self.output_ports))]

    @property
    def typed_inputs(self) -> list[tuple[str, int]]:
        """Its input values with their types."""
        return [(value, port.dtype) for value, port in zip(self.inputs, self.input_ports, strict=True)]


class Graph:
    """Nodes in an order in which every value comes before its uses, except for the edge that closes a loop."""

    def __init__(
        self,
        definitions: Iterable[Any],
        library: Mapping[str, Any],
        signature: Any = None,
        returned: Mapping[str, str] | None = None,
    ) -> None:
        self.in_function = signature is not None
        self.replaced_bytes: Mapping[str, int] = {}
        self.arguments = [(arg.name, arg.type) for arg in signature.input_arg] if signature else []
        self.results = [(arg.name, arg.type) for arg in signature.output_arg] if signature else []
        self.returns = [_plain((returned or {})[name]) for name, _ in self.results]
        self._add(definitions, library)

    def _add(self, definitions: Iterable[Any], library: Mapping[str, Any]) -> None:
        nodes = [
            Node(definition, operation_definition(definition.op, library), in_function=self.in_function)
            for definition in definitions
        ]
        self.maker = {value: node for node in nodes for value in node.outputs}
        self.nodes = _ordered(nodes, self.maker)

    @classmethod
    def of_function(cls, function: Any, library: Mapping[str, Any]) -> Graph:
        """Return the body of a ``FunctionDef`` as a graph."""
        return cls(function.node_def, library, function.signature, dict(function.ret))

    def replaced(
        self,
        definitions: Iterable[Any],
        library: Mapping[str, Any],
        moved: Mapping[str, str],
        replaced_bytes: Mapping[str, int],
    ) -> Graph:
        """Return a copy of the graph with other nodes."""
        new = copy.copy(self)
        new.returns = [moved.get(value, value) for value in self.returns]
        new.replaced_bytes = replaced_bytes
        new._add([_taking(definition, moved) for definition in definitions], library)
        return new

    def consumers(self) -> dict[str, list[Node]]:
        """Return, for the name of each node, the nodes that take its values."""
        found: dict[str, list[Node]] = {node.name: [] for node in self.nodes}
        for node in self.nodes:
            for name in {self.maker[value].name for value in node.inputs if value in self.maker}:
                found[name].append(node)
        return found


def closes_loop(node: Node) -> bool:
    """Return whether a node of TensorFlow 1's control flow passes a loop's value to the next iteration."""
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
    return next(attr.default_value for attr in operation.attr if attr.name == name)  # left out, so it has its default


def _plain(value: str) -> str:
    """Return ``node`` for ``node:0``. Names in functions, which have three parts, stay as they are."""
    return value[:-2] if value.endswith(":0") and value.count(":") == 1 else value


def _ordered(nodes: list[Node], maker: Mapping[str, Node]) -> list[Node]:
    """Return nodes so that each comes after its inputs; nodes that do not depend on each other keep their order."""
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
    """Return the makers of a node's inputs that are not done, except for the edge that closes a loop."""
    makers = [maker[value] for value in node.inputs if value in maker]
    return [made for made in makers if made.name not in done and not closes_loop(made)]
