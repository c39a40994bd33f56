"""Find which values of a step depend on others: those that depend on the seeds of a backward pass are gradients.

A value that depends on this gradient is itself a gradient and is proportional to the loss scale; no other value is. The
scopes of a backward pass also contain other values, such as the ``2 * (prediction - target)`` of a squared error: it is
a factor of a gradient, and the loss scale does not change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.graphs.decisions import Pass, TypedNode
from polyamp.backends.tensorflow.graphs.graph import FLOATING

_CARRYING = frozenset({*FLOATING, tf.variant.as_datatype_enum})
"""Types that gradients have; a list of gradients is a variant."""


class Dependence:
    """The values that depend on some starting values, in a graph and in the functions that it calls."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._tensors = tensors  # symbolic ones, which may be of any graph
        self._known: dict[tuple[int, frozenset[str]], set[str]] = {}

    def of(self, decisions: Pass, arguments: frozenset[str] = frozenset()) -> set[str]:
        """Return the values of a graph that depend on its starting values or on these of its arguments."""
        key = (id(decisions), arguments)
        if key not in self._known:
            self._known[key] = found = {*arguments, *_values_of(decisions, self._tensors)}
            before = -1
            while len(found) != before:  # in TensorFlow 1, a loop has an edge that leads back
                before = len(found)
                for decided in decisions.nodes:
                    found.update(self._outputs(decided, found))
        return self._known[key]

    def inside(self, decided: TypedNode, found: set[str]) -> list[frozenset[str]]:
        """Return, for each function that a node calls, its arguments that depend on the starting values."""
        flags = self._flags(decided, found)
        return [
            frozenset(name for (name, _), flag in zip(one.decisions.graph.arguments, flags, strict=False) if flag)
            for one in decided.inside
        ]

    def _flags(self, decided: TypedNode, found: set[str]) -> list[bool]:
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
    def _of_iteration(decided: TypedNode, flags: list[bool]) -> list[bool]:
        attributes, count = decided.node.definition.attr, len(decided.inside[0].decisions.graph.arguments)
        carried, captured = (len(attributes[name].list.type) for name in ("Tstate", "Targuments"))
        elements = [False] * (count - carried - captured)
        return [*flags[1 : 1 + carried], *elements, *flags[len(flags) - captured :]]

    def _carried(self, decided: TypedNode, flags: list[bool]) -> list[bool]:
        """Return which carried values of a loop depend on the starting values, after any number of iterations."""
        body = decided.inside[-1].decisions
        while True:
            names = frozenset(name for (name, _), flag in zip(body.graph.arguments, flags, strict=True) if flag)
            made = self.of(body, names)
            turned = [old or value in made for old, value in zip(flags, body.graph.returns, strict=True)]
            if turned == flags:
                return flags
            flags = turned

    def _outputs(self, decided: TypedNode, found: set[str]) -> list[str]:
        node = decided.node
        if decided.inside:
            inside = zip(decided.inside, self.inside(decided, found), strict=True)
            made = [
                [value in self.of(one.decisions, names) for value in one.decisions.graph.returns]
                for one, names in inside
            ]
            flags = list(map(any, zip(*made[-1:] if decided.operation == "while_loop" else made, strict=True)))
        else:
            flags = [any(value in found for value in node.inputs)] * len(node.outputs)
        ports = zip(node.outputs, node.output_ports, flags, strict=False)
        return [value for value, port, flag in ports if flag and port.dtype in _CARRYING]


def _values_of(decisions: Pass, tensors: Sequence[Any]) -> list[str]:
    """Return the names that these symbolic tensors have as values of a graph."""
    here = [tensor for tensor in tensors if tensor.graph is decisions.traced]
    named = {node.name: node for node in decisions.graph.nodes} if here else {}
    made = [named[one.op.name].outputs[one.value_index] for one in here if one.op.name in named]
    inputs = zip(decisions.graph.arguments, getattr(decisions.traced, "inputs", ()), strict=False)
    return [*made, *(name for (name, _), given in inputs if any(given is one for one in here))]
