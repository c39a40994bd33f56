"""Keras' dtype policies: the one that a layer needs for its decided formats, and the one that a model already has."""

from __future__ import annotations

from typing import Any

from polyamp.backends.keras.layers.borders import border_of
from polyamp.backends.keras.layers.decisions import Part
from polyamp.backends.keras.layers.tree import walk
from polyamp.errors import UnsupportedError
from polyamp.formats import format_of
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy

KERAS_POLICIES = {
    ("float32", "float32"): "float32",
    ("float32", "float16"): "mixed_float16",
    ("float32", "bfloat16"): "mixed_bfloat16",
    ("float16", "float16"): "float16",
    ("bfloat16", "bfloat16"): "bfloat16",
}


def keras_policy(policy: Policy) -> str:
    """Return the name of the dtype policy that stores and computes in a policy's formats."""
    name = KERAS_POLICIES.get((policy.param, policy.compute))
    if name is None:
        raise UnsupportedError(
            "Keras has no dtype policy for these formats",
            where="convert(model, policy)",
            found=f"param {policy.param}, compute {policy.compute}",
            allowed=", ".join(KERAS_POLICIES.values()),
            fix='use one of those; for float8, Keras has model.quantize("float8")',
        )
    return name


def policy_of(part: Part, policy: Policy) -> str:
    """Return the name of the dtype policy under which a layer computes as was decided, border included."""
    inside, outside = part.border
    if inside == "float32" and not (part.in_code and part.border.is_crossed):
        return "float32"
    given = outside or inside
    is_wide = inside == "float32" or part.op_class == "inner"
    if is_wide and given != "float32" and any(variable.dtype == "float32" for variable in part.layer.weights):
        return f"mixed_{given}"
    return keras_policy(policy)


def own_policy(model: Any) -> str | None:
    """Return the name of the 16-bit dtype policy that layers of a model have; None if all compute in float32."""
    layers = (layer for layer in walk(model) if format_of(border_of(layer).inside).is_low)
    names = (layer.dtype_policy.name for layer in layers)
    return next((name for name in names if name in KERAS_POLICIES.values()), None)


def remaining_policy(model: Any, policy: Policy) -> Policy:
    """Return the policy for Keras' backend to apply: float32 if layers have their own 16-bit policies already."""
    return policy if own_policy(model) is None else make_policy("float32")
