"""Decide for each layer of a model its class, and the formats that it computes in and returns.

The class comes from a policy's rules, else from the table of operations, as for an operation in a graph. A layer whose
outputs are the model's is of class ``full`` under a policy with float32 outputs. The border follows from the class, and
from the code that calls the layer: Python code does not cast, so a layer that it calls returns the format of that code.

For example, a float16 policy makes of ``Dense -> LayerNormalization -> Dense``: the first ``Dense`` ``lower``
(float16); the norm ``inner`` (float32 inside, float16 outside); the last ``Dense``, which returns the model's output,
``full`` (float32).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras

from polyamp.backends.keras.dtypes import CASTABLE
from polyamp.backends.keras.layers.borders import Border, border_of
from polyamp.backends.keras.layers.kinds import can_compute, is_wide_inside, operation_of
from polyamp.backends.keras.layers.tree import children, heads, runs_code
from polyamp.operations import OPERATIONS as TABLE
from polyamp.policies import Policy
from polyamp.rules import Rule

Choice = Callable[[Policy, str, Any, str, bool], str]
"""Chooses a layer's class from a policy, the layer's operation, the layer, its path, and whether it is a head."""


class Part(NamedTuple):
    """One layer and the decisions for it."""

    path: str  # the names from the model down to the layer
    layer: Any  # the layer
    operation: str  # the canonical name of its work
    is_head: bool  # whether the model's outputs come from it
    op_class: str  # its class
    border: Border  # the formats that it computes in and returns
    in_code: bool  # whether Python code calls it, and not a graph of layers


class _Surroundings(NamedTuple):
    """The parts of a decision that depend on the layers around a layer."""

    above: str = ""  # the path of the layer around it; empty for the model
    gives_output: bool = True  # whether the model's outputs come from it
    outside: str = ""  # the format of the Python code that calls it; empty if no such code does
    depth: int = 0  # how many layers are around it


def op_class_of(policy: Policy, operation: str, layer: Any, path: str, is_head: bool) -> str:
    """Return the class of a layer: that of a rule, else ``full`` for a head, else that of the table."""
    rule = next((rule for rule in policy.rules if matches(rule, operation, path)), None)
    if rule is not None:
        return policy.decide(operation, path).op_class if rule.matches(operation, path) else "full"
    if is_head and policy.output == "float32":
        return "full"
    return policy.decide(operation, path).op_class if operation else "follow"


def matches(rule: Rule, operation: str, path: str) -> bool:
    """Return whether a rule names a layer, or keeps in float32 an operation inside the layer."""
    *_, last = rule.pattern.replace(".", "/").split("/")
    names_inside = rule.op_class == "full" and last in TABLE and last != rule.pattern
    return rule.matches(operation, path) or (names_inside and rule.matches(last, path))


def parts_of(model: Any, policy: Policy, choose: Choice = op_class_of) -> list[Part]:
    """Return the decisions for a model and all layers inside, outer ones first."""
    return list(_parts(model, policy, choose, _Surroundings()))


def can_change(part: Part) -> bool:
    """Return whether polyamp sets the formats of a part's layer."""
    return part.op_class != "keep" and can_compute(part.layer)


def _parts(layer: Any, policy: Policy, choose: Choice, around: _Surroundings) -> Iterator[Part]:
    part = _decide(layer, policy, choose, around)
    yield part
    for child in children(layer):
        yield from _parts(child, policy, choose, _surroundings_of(child, part, around))


def _decide(layer: Any, policy: Policy, choose: Choice, around: _Surroundings) -> Part:
    path = f"{around.above}/{layer.name}" if around.above else layer.name
    operation, outside = operation_of(layer), around.outside
    is_head = around.gives_output and not isinstance(layer, keras.Model)
    if is_head and runs_code(layer) and not _is_named(policy, operation, path) and policy.output == "float32":
        is_head, outside = False, "float32"  # its code runs in 16 bits, and its outputs are cast
    op_class = choose(policy, operation, layer, path, is_head)
    inside = _inside(layer, operation, op_class, policy)
    if around.depth == 1 and _is_named(policy, "", path):
        outside = ""  # the user decides what a model's own code receives, such as from its head
    returned = policy.compute if op_class == "inner" and inside == "float32" and can_compute(layer) else ""
    return Part(path, layer, operation, is_head, op_class, Border(inside, outside or returned), bool(outside))


def _surroundings_of(child: Any, part: Part, around: _Surroundings) -> _Surroundings:
    layer = part.layer
    if runs_code(layer):
        outside = part.border.inside if part.border.inside in CASTABLE else ""
    else:  # of a model of layers, only the last ones return to the code that calls it
        returns = isinstance(layer, keras.Model) and _contains(heads(layer), child)
        outside = part.border.outside if returns and part.in_code else ""
    gives_output = around.gives_output and _contains(heads(layer), child)
    return _Surroundings(part.path, gives_output, outside, around.depth + 1)


def _inside(layer: Any, operation: str, op_class: str, policy: Policy) -> str:
    if op_class == "keep" or not can_compute(layer):
        return border_of(layer).inside
    if op_class == "inner" and not is_wide_inside(layer, operation):
        return "float32"
    return "float32" if op_class == "full" else policy.compute


def _is_named(policy: Policy, operation: str, path: str) -> bool:
    return any(rule.matches(operation, path) for rule in policy.own_rules)


def _contains(layers: list[Any], layer: Any) -> bool:
    return any(one is layer for one in layers)
