"""Set the decided formats on layers: for good, or while rules are tried."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from polyamp.backends.keras.layers.borders import Border, border_of, set_border
from polyamp.backends.keras.layers.decisions import Part, can_change, matches, op_class_of, parts_of
from polyamp.backends.keras.layers.kinds import casts_inside
from polyamp.backends.keras.layers.policies import own_policy, policy_of
from polyamp.formats import format_of
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy


def set_formats(parts: Iterable[Part], policy: Policy) -> None:
    """Set the dtype policy and the border of every layer that polyamp may change."""
    # All dtype policies are chosen before the first is set, so an error changes nothing.
    for layer, name, border in [(one.layer, policy_of(one, policy), one.border) for one in parts if can_change(one)]:
        layer.dtype_policy = name
        set_border(layer, Border(border.inside) if casts_inside(layer) else border)
        if casts_inside(layer):
            layer.autocast = False  # it casts its inputs to float32 itself; Keras would round them first


@contextmanager
def amended(model: Any, policy: Policy) -> Iterator[None]:
    """Apply a policy's own rules to the layers that they name, until the context ends."""
    # All other layers stay as they are. So rules can be tried on a model that computes in 16 bits by itself.
    own = own_policy(model)
    if own is None or not policy.own_rules:
        yield
        return
    tried = make_policy(own, rules=dict(policy.own_rules))
    parts = [part for part in parts_of(model, tried, _amended_class) if can_change(part)]
    before = [(part.layer, part.layer.dtype_policy, border_of(part.layer)) for part in parts]
    set_formats(parts, tried)
    try:
        yield
    finally:
        for layer, dtype_policy, border in before:
            layer.dtype_policy = dtype_policy
            set_border(layer, border)


def _amended_class(policy: Policy, operation: str, layer: Any, path: str, is_head: bool) -> str:
    """Return the class that the rules name, else the class that fits the formats that the layer has now."""
    if any(matches(rule, operation, path) for rule in policy.own_rules):
        return op_class_of(policy, operation, layer, path, is_head)
    inside, outside = border_of(layer)
    crosses = bool(outside) and format_of(outside).is_low
    return "lower" if format_of(inside).is_low else "inner" if crosses else "full"
