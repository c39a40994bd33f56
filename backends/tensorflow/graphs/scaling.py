"""Find gradients in a step's graph that are unscaled but whose loss was not scaled, or that were clipped too early.

In the graph, the update reads the loss scale to divide gradients by it. These gradients have to depend on a read of the
same variable outside the update: that read scales a loss. If they do not, nobody scaled their loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from polyamp.adapter import UPDATE_SCOPE
from polyamp.backends.tensorflow.graphs.decisions import Pass
from polyamp.backends.tensorflow.graphs.dependence import Dependence
from polyamp.backends.tensorflow.graphs.graph import Node
from polyamp.backends.tensorflow.graphs.places import Places
from polyamp.backends.tensorflow.graphs.update import backward_pass, is_gradient

SCALES = ("loss_scale", "dynamic_scale")
"""Names of the variables that hold a loss scale: in polyamp, and in Keras' optimizers."""

_RESOURCES = frozenset({tf.resource.as_datatype_enum})
_CLIPPING = ("ClipByValue", "Maximum", "Minimum", "L2Loss", "EuclideanNorm")


class Scaling(NamedTuple):
    """The errors in how a step scales its loss."""

    unscaled: tuple[str, ...]  # places where gradients are divided by a loss scale that did not multiply their loss
    clipped: tuple[str, ...]  # places where gradients are clipped while they are scaled


def scaling_of(decisions: Pass, traced: Any) -> Scaling:
    """Return the errors in the decided graph of a step, and in the functions that it calls."""
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
    return Scaling(tuple(dict.fromkeys(unscaled)), tuple(dict.fromkeys(clipped)))


def _scaled(handles: Dependence) -> Dependence:
    """Return the values that depend on a read of a loss scale outside the update."""
    return Dependence(lambda decisions: _reads(decisions, handles.anywhere(decisions), in_update=False))


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


def _reads(decisions: Pass, handles: set[str], *, in_update: bool) -> list[str]:
    """Return values that are read from these variables, inside the update or outside it."""
    reads = (node for node in decisions.graph.nodes if node.op == "ReadVariableOp" and node.inputs[0] in handles)
    return [value for node in reads if _is_update(node) == in_update for value in node.outputs]


def _unscaled_values(decisions: Pass, handles: set[str]) -> list[str]:
    """Return the gradients that are divided by the loss scale: the update multiplies them by a value made from it."""
    graph = decisions.graph
    found, grads = set(_reads(decisions, handles, in_update=True)), list[str]()
    for node in graph.nodes if found else ():
        if not _is_update(node) or found.isdisjoint(node.inputs):
            continue
        others = [_before_update(decisions, value) for value in node.inputs if value not in found]
        if node.op == "Mul" and others:
            grads += [value for value in others if value in graph.maker and not _is_update(graph.maker[value])]
        elif node.op in ("RealDiv", "Div", "Mul", "Cast", "SelectV2", "Identity", "Reciprocal"):
            found.update(node.outputs)
    backward = backward_pass(graph, decisions.functions.library) if grads else set()
    return [value for value in dict.fromkeys(grads) if graph.maker[value].name in backward]


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
    after = backward_pass(graph, decisions.functions.library) if grads else set()
    while pending:
        node = pending.pop()
        if node.name in seen or node.name not in after or is_gradient(node.name) or _is_update(node):
            continue
        seen.add(node.name)
        if node.op in _CLIPPING or any(part.startswith("clip_by_") for part in node.name.split("/")[:-1]):
            yield node
            return
        pending += [graph.maker[value] for value in node.inputs if value in graph.maker]


def _place(decisions: Pass, places: Places, value: str) -> str:
    node = decisions.graph.maker[value]
    return places.line(node.name) or decisions.scopes.path_of(node)
