"""Find which values of a step depend on others, for example on the gradient of its loss.

A value that depends on this gradient is itself a gradient and is proportional to the loss scale; no other value is. The
scopes of a backward pass also contain other values, such as the ``2 * (prediction - target)`` of a squared error: it is
a factor of a gradient, and the loss scale does not change it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.graphs.decisions import Decided, Pass
from polyamp.backends.tensorflow.graphs.graph import FLOATING

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
