"""Finds the part of a training step that updates variables: it is never lowered.

Unscaling, clipping and the optimizer's arithmetic handle numbers far smaller than float16 holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from polyamp.backends.tensorflow.graph import Graph, Node
from polyamp.markers import UPDATE_SCOPE

_GRADIENT_SCOPE = re.compile(r"gradient_tape|gradients(_\d+)?")
_WRITES = re.compile(r"(Assign|ResourceApply|ResourceSparseApply|ResourceScatter|Apply|SparseApply|Scatter).*")


def is_gradient(node: Node) -> bool:
    """Whether a node belongs to the backward pass: by the scopes of ``tf.GradientTape`` and ``tf.gradients``."""
    if any(_GRADIENT_SCOPE.fullmatch(part) for part in node.name.split("/")[:-1]):
        return True
    called = node.definition.attr["f"].func.name if "f" in node.definition.attr else ""
    return "__backward_" in called  # the derivative of a function that was traced by itself


def update_region(graph: Graph) -> set[str]:
    """The names of the nodes of the update.

    They are what stands in the scope of a wrapped optimizer; what comes after gradients, when no gradient comes after
    it; and what is made of the state that it keeps, such as momentum.
    """
    gradients = {node.name for node in graph.nodes if is_gradient(node)}
    marked = {node.name for node in graph.nodes if UPDATE_SCOPE in node.name.split("/")}
    if not gradients and not marked:
        return set()
    consumers = graph.consumers()
    before = _reaching(graph, gradients | marked) - marked
    region = marked | (_after(consumers, gradients) - gradients - before)
    while state := _state_reads(graph, region, before):
        region |= state | (_after(consumers, state) - gradients - before)
    return region | _sums_of_gradients(graph, region, consumers)


def _after(consumers: Mapping[str, list[Node]], start: Iterable[str]) -> set[str]:
    return _closure(start, lambda name: (node.name for node in consumers[name]))


def _reaching(graph: Graph, goals: set[str]) -> set[str]:
    makers = {node.name: _makers(graph, node) for node in graph.nodes}
    return _closure(goals, lambda name: makers[name])


def _closure(start: Iterable[str], following: Callable[[str], Iterable[str]]) -> set[str]:
    found, pending = set(start), list(start)
    while pending:
        for name in following(pending.pop()):
            if name not in found:
                found.add(name)
                pending.append(name)
    return found


def _makers(graph: Graph, node: Node) -> list[str]:
    return [graph.maker[value].name for value in node.inputs if value in graph.maker]


def _state_reads(graph: Graph, region: set[str], before: set[str]) -> set[str]:
    """Nodes that read variables which only the update uses, and are not in its region yet."""
    handles = {
        value for node in graph.nodes if node.name in region and _WRITES.fullmatch(node.op) for value in node.inputs[:1]
    }
    outside = {value for node in graph.nodes if node.name in before for value in node.inputs}
    own = handles - outside
    return {
        node.name
        for node in graph.nodes
        if node.name not in region and node.name not in before and not own.isdisjoint(node.inputs)
    }


def _sums_of_gradients(graph: Graph, region: set[str], consumers: Mapping[str, list[Node]]) -> set[str]:
    """Sums of one parameter's gradients, which in 16 bits would stop growing: with many uses, many terms."""
    return {
        node.name
        for node in graph.nodes
        if node.op in ("AddN", "AddV2", "Add")
        and is_gradient(node)
        and consumers[node.name]
        and all(after.name in region for after in consumers[node.name])
    }
