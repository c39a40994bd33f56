"""A typed graph: the nodes of a ``GraphDef`` or of a function's body, with the types of their inputs and outputs.

A value is named by the text that refers to it: ``node`` or ``node:1`` in a ``GraphDef``, ``node:output:0`` or an
argument's name in a function.

`Places` finds the source lines and shapes of nodes. Rules name scopes as the code asked for them, and a
gradient has the scope of its forward operation. For example, ``gradient_tape/dense_1/MatMul/MatMul`` differentiates
``dense_1/MatMul``; if the code asked for the scope ``dense``, the scope of both nodes is ``dense``.
"""

from __future__ import annotations

import copy
import math
import os
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from polyamp.backends.tensorflow.operations import OPERATIONS
from polyamp.backends.tensorflow.unstable import as_asked, graph_of, operation_definition
from polyamp.errors import is_users
from polyamp.numbering import terms_of_einsum

One = TypeVar("One", bound=Hashable)
NodeDef = tf.compat.v1.NodeDef

UPDATE_SCOPE = "polyamp_update"
"""The name scope of unscaling, clipping and the optimizer's arithmetic. A rewrite leaves them as written."""

FINITE = "polyamp_finite"
"""The name of the scalar boolean that decides whether a step is applied."""

FLOAT32: int = tf.float32.as_datatype_enum
FLOATING: frozenset[int] = frozenset(
    kind.as_datatype_enum for kind in (tf.float32, tf.float16, tf.bfloat16, tf.float64, tf.complex64, tf.complex128)
)
READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
"""Operations that return the same until the variable is written. A read after a write waits for it."""


class Port(NamedTuple):
    """One input or output of a node."""

    dtype: int  # a number of TensorFlow's ``DataType``; those above 100 are references to variables
    attribute: str = ""  # the type attribute of the node that sets the type; empty if the operation fixes it
    position: int | None = None  # the position in that attribute, if it is a list


class Node:
    """One node with its typed inputs and outputs."""

    __slots__ = ("called", "definition", "input_ports", "inputs", "is_pure", "name", "op", "output_ports", "outputs")

    def __init__(self, definition: Any, operation: Any, *, in_function: bool) -> None:
        self.definition, self.name, self.op = definition, definition.name, definition.op
        self.inputs = [_plain(text) for text in definition.input if not text.startswith("^")]
        self.called = called_functions(definition)
        if operation is None:  # a call of a function by its name, as graphs of TensorFlow 1 have them
            self.input_ports, self.output_ports, self.outputs = [Port(0)] * len(self.inputs), [], []
            self.is_pure = False
            return
        attributes = definition.attr
        self.input_ports = [port for arg in operation.input_arg for port in _ports(arg, attributes, operation)]
        of_args = [_ports(arg, attributes, operation) for arg in operation.output_arg]
        self.output_ports = [port for ports in of_args for port in ports]
        refers = any(port.dtype > 100 for port in (*self.input_ports, *self.output_ports))
        self.is_pure = not (operation.is_stateful or refers)  # it returns the same for the same inputs
        if in_function:
            names = ((arg.name, len(ports)) for arg, ports in zip(operation.output_arg, of_args, strict=True))
            self.outputs = [f"{self.name}:{name}:{index}" for name, count in names for index in range(count)]
        else:
            self.outputs = [f"{self.name}:{index}" if index else self.name for index in range(len(self.output_ports))]

    @property
    def controls(self) -> list[str]:
        """The names of the nodes that must run before it."""
        return [text[1:] for text in self.definition.input if text.startswith("^")]

    @property
    def typed_inputs(self) -> list[tuple[str, int]]:
        """The node's input values with their types."""
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
        new._add([changed(one, [moved.get(text, text) for text in one.input]) for one in definitions], library)
        return new

    def made_from(self, values: Iterable[str]) -> set[str]:
        """Return these values and all values that they are computed from."""
        return closure(values, lambda value: self.maker[value].inputs if value in self.maker else [])

    def consumers(self) -> dict[str, list[Node]]:
        """Return, for the name of each node, the nodes that take its values."""
        found: dict[str, list[Node]] = {node.name: [] for node in self.nodes}
        for node in self.nodes:
            for name in {self.maker[value].name for value in node.inputs if value in self.maker}:
                found[name].append(node)
        return found


def closure(start: Iterable[One], following: Callable[[One], Iterable[One]]) -> set[One]:
    """Return ``start`` and all that ``following`` leads to from there, directly or through others."""
    found = set(start)
    pending = list(found)
    while pending:
        for one in following(pending.pop()):
            if one not in found:
                found.add(one)
                pending.append(one)
    return found


def terms_of(node: Node, lengths: Sequence[Sequence[int]]) -> int:
    """Return how many terms each element of a product adds up, by the lengths of its operands' axes."""
    attributes = node.definition.attr
    if node.op == "Einsum":
        return terms_of_einsum(attributes["equation"].s.decode(), lengths)
    is_turned = any(attributes[name].b for name in ("transpose_a", "adj_x") if name in attributes)
    return lengths[0][-2 if is_turned else -1] if lengths[0] else 0


def called_functions(definition: Any) -> list[str]:
    """Return the names of the functions in a node's attributes."""
    values = definition.attr.values()
    return [one.name for value in values for one in (value.func, *value.list.func) if one.name]


def closes_loop(node: Node) -> bool:
    """Return whether a node of TensorFlow 1's control flow passes a loop's value to the next iteration."""
    return node.op in ("NextIteration", "RefNextIteration")


def maker_name(reference: str) -> str:
    """Return the node that a reference names: a value ``node:output:0``, or a control input ``^node``."""
    return reference.removeprefix("^").partition(":")[0]


def changed(definition: Any, inputs: Iterable[str], attributes: Mapping[str, Any] | None = None) -> Any:
    """Return a copy of a node's definition with other inputs, and with other values of some attributes."""
    new = NodeDef()
    new.CopyFrom(definition)
    new.input[:] = inputs
    for name, value in (attributes or {}).items():
        new.attr[name].CopyFrom(value)
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


class Places:
    """The source lines and shapes that a traced ``tf.Graph`` knows."""

    def __init__(self, traced: Any) -> None:
        self._traced = traced

    def within(self, function: str) -> Places:
        """Return the places of a function that this graph calls."""
        return Places(graph_of(function, self._traced))

    def of(self, path: str, name: str) -> str:
        """Return the path of a node, and the line of the user's code that made it."""
        return " ".join(filter(None, (path, self.line(name))))

    def line(self, name: str) -> str:
        """Return file and line of the user's code that made a node; empty if that is not known."""
        own = next((frame for frame in self._frames(name) if is_users(frame[0])), None)
        return f"{Path(own[0]).name}:{own[1]}" if own else ""

    def is_users(self, name: str) -> bool:
        """Return whether the user's own code made a node, and not a layer or a loss that it called."""
        # Calls through functions of TensorFlow and ``keras.ops`` count for their caller.
        plain = _folders_of_functions()
        maker = next((frame[0] for frame in self._frames(name) if not frame[0].startswith(plain)), "")
        return bool(maker) and is_users(maker)

    def _frames(self, name: str) -> Iterator[Any]:
        """Return the frames of the code that made a node, innermost first."""
        operation = self._operation(name)
        return iter(()) if operation is None else reversed(operation.traceback or [])

    def elements(self, graph: Graph, value: str) -> int:
        """Return the number of elements of a value; 0 if its shape is not known."""
        shape = self.shape(graph, value)
        return 0 if shape is None else math.prod(shape)

    def shape(self, graph: Graph, value: str) -> tuple[int, ...] | None:
        """Return the shape of a value; None if it is not known."""
        tensor = self._tensor(graph, value)
        return tuple(tensor.shape) if tensor is not None and tensor.shape.is_fully_defined() else None

    def lengths(self, graph: Graph, value: str) -> list[int]:
        """Return the lengths of a value's axes, 0 where unknown; no axes if even their number is unknown."""
        tensor = self._tensor(graph, value)
        known = tensor is not None and tensor.shape.rank is not None
        return [0 if length is None else length for length in tensor.shape] if known else []

    def _tensor(self, graph: Graph, value: str) -> Any:
        maker = graph.maker.get(value)
        if maker is None:  # an argument, which has another name in a function's definition
            arguments = dict(
                zip((name for name, _ in graph.arguments), getattr(self._traced, "inputs", ()), strict=False)
            )
            return arguments.get(value)
        operation = self._operation(maker.name)
        index = maker.outputs.index(value)
        return operation.outputs[index] if operation is not None and index < len(operation.outputs) else None

    def _operation(self, name: str) -> Any:
        if self._traced is None:
            return None
        try:
            return self._traced.get_operation_by_name(name)
        except KeyError:
            return None


def _folders_of_functions() -> tuple[str, ...]:
    """Return the folders of TensorFlow and of Keras' operations, each with a separator at its end."""
    folders = [Path(tf.__file__).parent]
    keras = sys.modules.get("keras")
    if keras is not None and keras.__file__:
        folders += [Path(keras.__file__).parent / "src" / name for name in ("ops", "backend")]
    return tuple(f"{folder}{os.sep}" for folder in folders)


_GRADIENT_SCOPE = re.compile(r"gradient_tape|gradients(_\d+)?")


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


_OPERATORS = {"RealDiv": "truediv", "FloorDiv": "floordiv", "FloorMod": "mod"}  # names that are not canonical
_DEFAULTS = {*OPERATIONS, "add", "sub", "mul", "neg", "pow", "matmul", "truediv", "while", "cond"}
_FORWARD_INPUT = {"AddN": 0, "FusedBatchNormGradV3": 3}  # the input that leads to a node with a scope


class Scopes:
    """The scopes of one graph's nodes."""

    def __init__(self, graph: Graph, path: str, traced: Any, others: Callable[[], Iterable[Scopes]]) -> None:
        self.path, self._graph, self._traced, self._others = path, graph, traced, others
        self._named = {node.name: node for node in graph.nodes}

    def path_of(self, node: Node) -> str:
        """Return the path of a node: its scopes, then its name."""
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

    def forward_node(self, node: Node) -> Node | None:
        """Return the node that a gradient differentiates; None if that is not in this graph."""
        return self._node_at(forward_of(node.name))

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
        """Return the node of a name, with the scopes of its graph, which can be the forward function's graph."""
        if (node := self._node_at(name)) is not None:
            return self, node
        home = next((one for one in self._others() if one.path == self.path and one._node_at(name)), self)
        return home, home._node_at(name)


def _within(path: str, name: str) -> str:
    """Return a name below a path. In the bodies of loops and branches, names can start with the path already."""
    return name if f"{name}/".startswith(f"{path}/") else "/".join(filter(None, (path, name)))


def _repeats_operation(name: str, op: str) -> bool:
    """Return whether a name is the one that TensorFlow chooses for an operation without a name."""
    return name.lower() in {op.lower(), op.lower().rstrip("v234"), OPERATIONS.get(op, ""), _OPERATORS.get(op)}
