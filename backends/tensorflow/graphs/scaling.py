"""Find which values of a step depend on others, and gradients that are unscaled without need or clipped too early.

A value that depends on this gradient is itself a gradient and is proportional to the loss scale; no other value is. The
scopes of a backward pass also contain other values, such as the ``2 * (prediction - target)`` of a squared error: it is
a factor of a gradient, and the loss scale does not change it.

In the graph, the update reads the loss scale to divide gradients by it. These gradients have to depend on a read of the
same variable outside the update: that read scales a loss. If they do not, nobody scaled their loss.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from polyamp.adapters import UPDATE_SCOPE
from polyamp.backends.tensorflow.graphs.decisions import Decided, Pass
from polyamp.backends.tensorflow.graphs.graph import FLOATING, Node, Places
from polyamp.backends.tensorflow.graphs.parts import is_gradient

CARRYING = frozenset({*FLOATING, tf.variant.as_datatype_enum})
"""Types that gradients have; a list of gradients is a variant."""


class Dependence:
    """The values that depend on some starting values, in a graph and in the functions that it calls."""

    def __init__(self, starts: Callable[[Pass], Iterable[str]], carrying: Container[int] = CARRYING) -> None:
        self._starts, self._carrying = starts, carrying
        self._known: dict[tuple[int, frozenset[str]], set[str]] = {}

    @classmethod
    def on(cls, tensors: Sequence[Any], carrying: Container[int] = CARRYING) -> Dependence:
        """Return the values that depend on these symbolic tensors, which may be of any graph."""
        return cls(lambda decisions: _values_of(decisions, tensors), carrying)

    def anywhere(self, decisions: Pass) -> set[str]:
        """Return the values of a graph that depend on the starting values in any call that was examined."""
        return set().union(*(found for (key, _), found in self._known.items() if key == id(decisions)))

    def of(self, decisions: Pass, arguments: frozenset[str] = frozenset()) -> set[str]:
        """Return the values of a graph that depend on its starting values or on these of its arguments."""
        key = (id(decisions), arguments)
        if key not in self._known:
            self._known[key] = found = {*arguments, *self._starts(decisions)}
            before = -1
            while len(found) != before:  # in TensorFlow 1, a loop has an edge that leads back
                before = len(found)
                for decided in decisions.nodes:
                    found.update(self._outputs(decided, found))
        return self._known[key]

    def inside(self, decided: Decided, found: set[str]) -> list[frozenset[str]]:
        """Return, for each function that a node calls, its arguments that depend on the starting values."""
        flags = self._flags(decided, found)
        return [
            frozenset(name for (name, _), flag in zip(one.decisions.graph.arguments, flags, strict=False) if flag)
            for one in decided.inside
        ]

    def _flags(self, decided: Decided, found: set[str]) -> list[bool]:
        """Return, for each argument of the functions that a node calls, whether it depends on the starting values."""
        node = decided.node
        flags = [value in found for value in node.inputs]
        if node.op in ("ScanDataset", "ReduceDataset"):  # their functions take an element after the carried values
            return self._of_iteration(decided, flags)
        if decided.operation == "cond":
            return flags[1:]
        if decided.operation == "while_loop":
            return self._carried(decided, flags)
        return flags

    @staticmethod
    def _of_iteration(decided: Decided, flags: list[bool]) -> list[bool]:
        attributes, count = decided.node.definition.attr, len(decided.inside[0].decisions.graph.arguments)
        carried, captured = (len(attributes[name].list.type) for name in ("Tstate", "Targuments"))
        elements = [False] * (count - carried - captured)
        return [*flags[1 : 1 + carried], *elements, *flags[len(flags) - captured :]]

    def _carried(self, decided: Decided, flags: list[bool]) -> list[bool]:
        """Return which carried values of a loop depend on the starting values, after any number of iterations."""
        body = decided.inside[-1].decisions
        while True:
            names = frozenset(name for (name, _), flag in zip(body.graph.arguments, flags, strict=True) if flag)
            made = self.of(body, names)
            turned = [old or value in made for old, value in zip(flags, body.graph.returns, strict=True)]
            if turned == flags:
                return flags
            flags = turned

    def _outputs(self, decided: Decided, found: set[str]) -> list[str]:
        node = decided.node
        if decided.inside:
            inside = zip(decided.inside, self.inside(decided, found), strict=True)
            made = [(one.decisions.graph.returns, self.of(one.decisions, names)) for one, names in inside]
            functions = made[-1:] if decided.operation == "while_loop" else made
            flags = [any(value in values for value, values in given) for given in _across(functions)]
        else:
            flags = [any(value in found for value in node.inputs)] * len(node.outputs)
        ports = zip(node.outputs, node.output_ports, flags, strict=False)
        return [value for value, port, flag in ports if flag and port.dtype in self._carrying]


def _values_of(decisions: Pass, tensors: Sequence[Any]) -> list[str]:
    """Return the names that these symbolic tensors have as values of a graph."""
    here = [tensor for tensor in tensors if tensor.graph is decisions.traced]
    named = {node.name: node for node in decisions.graph.nodes} if here else {}
    made = [named[one.op.name].outputs[one.value_index] for one in here if one.op.name in named]
    inputs = zip(decisions.graph.arguments, getattr(decisions.traced, "inputs", ()), strict=False)
    return [*made, *(name for (name, _), given in inputs if any(given is one for one in here))]


def _across(functions: Sequence[tuple[Sequence[str], set[str]]]) -> list[list[tuple[str, set[str]]]]:
    """Return the results of several functions by position, each with the dependent values of its function."""
    columns = zip(*(returns for returns, _ in functions), strict=True)
    return [[(value, values) for value, (_, values) in zip(column, functions, strict=True)] for column in columns]


SCALES = ("loss_scale", "dynamic_scale")
"""Names of the variables that hold a loss scale: in polyamp, and in Keras' optimizers."""

_RESOURCES = frozenset({tf.resource.as_datatype_enum})
_CLIPPING = ("ClipByValue", "Maximum", "Minimum", "L2Loss", "EuclideanNorm")


def misscaled(decisions: Pass, traced: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the places in a step where gradients are unscaled though their loss was not scaled, or clipped scaled."""
    unscaled, clipped = list[str](), list[str]()
    for handle in _scale_handles(traced):
        handles = Dependence.on([handle], _RESOURCES)
        handles.of(decisions)
        scaled = _scaled(handles)
        scaled.of(decisions)
        for body, places in _bodies(decisions, Places(traced)):
            grads = _unscaled_values(body, handles.anywhere(body))
            if grads and scaled.anywhere(body).isdisjoint(grads):
                unscaled.append(_place(body, places, grads[0]))
            else:
                clipped += [_place(body, places, node.outputs[0]) for node in _clipping(body, grads)]
    return tuple(dict.fromkeys(unscaled)), tuple(dict.fromkeys(clipped))


def _scaled(handles: Dependence) -> Dependence:
    """Return the values that depend on a read of a loss scale outside the update."""
    return Dependence(
        lambda decisions: [
            value
            for node in _reads(decisions, handles.anywhere(decisions))
            if not _is_update(node)
            for value in node.outputs
        ]
    )


def _scale_handles(traced: Any) -> list[Any]:
    names = {id(variable.handle): variable.name for variable in traced.variables if hasattr(variable, "handle")}
    found = ((names.get(id(outer), ""), inner) for outer, inner in getattr(traced, "captures", ()))
    return [inner for name, inner in found if name.rpartition("/")[2].partition(":")[0] in SCALES]


def _bodies(decisions: Pass, places: Places) -> Iterator[tuple[Pass, Places]]:
    yield decisions, places
    for decided in decisions.nodes:
        for inside in decided.inside:
            yield from _bodies(inside.decisions, places.within(inside.name))


def _is_update(node: Node) -> bool:
    return UPDATE_SCOPE in node.name.split("/")


def _reads(decisions: Pass, handles: set[str]) -> Iterator[Node]:
    """Yield the reads of these variables."""
    return (node for node in decisions.graph.nodes if node.op == "ReadVariableOp" and node.inputs[0] in handles)


def _unscaled_values(decisions: Pass, handles: set[str]) -> list[str]:
    """Return the gradients that are divided by the loss scale: the update multiplies them by a value made from it."""
    graph = decisions.graph
    found, grads = {value for node in _reads(decisions, handles) for value in node.outputs}, list[str]()
    for node in graph.nodes if found else ():
        if not _is_update(node) or found.isdisjoint(node.inputs):
            continue
        others = [_before_update(decisions, value) for value in node.inputs if value not in found]
        if node.op == "Mul" and others:
            grads += [value for value in others if value in graph.maker and not _is_update(graph.maker[value])]
        elif node.op in ("RealDiv", "Div", "Mul", "Cast", "SelectV2", "Identity", "Reciprocal"):
            found.update(node.outputs)
    return [value for value in dict.fromkeys(grads) if graph.maker[value].name in decisions.parts.backward]


def _before_update(decisions: Pass, value: str) -> str:
    """Return the value before the casts of the update."""
    maker = decisions.graph.maker.get(value)
    while maker is not None and _is_update(maker) and maker.op in ("Cast", "Identity"):
        value = maker.inputs[0]
        maker = decisions.graph.maker.get(value)
    return value


def _clipping(decisions: Pass, grads: list[str]) -> Iterator[Node]:
    """Yield the nodes that clip between a backward pass and the update."""
    graph = decisions.graph
    pending, seen = [graph.maker[value] for value in grads], set[str]()
    while pending:
        node = pending.pop()
        if node.name in seen or node.name not in decisions.parts.backward or is_gradient(node.name) or _is_update(node):
            continue
        seen.add(node.name)
        if node.op in _CLIPPING or any(part.startswith("clip_by_") for part in node.name.split("/")[:-1]):
            yield node
            return
        pending += [graph.maker[value] for value in node.inputs if value in graph.maker]


def _place(decisions: Pass, places: Places, value: str) -> str:
    node = decisions.graph.maker[value]
    return places.line(node.name) or decisions.scopes.path_of(node)
