"""Recognise norms that a program writes out as sums, roots and products, for the flow rule.

A layer norm by hand is ``(x - mean(x)) * rsqrt(variance(x) + eps) * scale + bias``. Its mean and variance are full
work. Everything after full work would be float32, and since norms are everywhere, this would be the whole network. But
the results of a norm are near one, so 16 bits can hold them. Each value therefore has a role (`polyamp.values.ROLES`)
that is found step by step:

==================================  ======================================
``m = mean(x)``                     ``statistic``
``v = mean(square(x)) - m * m``     ``statistic``
``r = rsqrt(v + eps)``              ``reciprocal root``
``y = x - m``                       ``normalized``: computed in float32
``z = y * r * scale + bias``        ``normalized``: still in float32
``relu(z)``                         takes ``z`` rounded, once
==================================  ======================================

Two kinds of results stay strong, because they may be much larger than one: a low value times a statistic that is not a
reciprocal root, which reverses a norm; and a value minus a sum, or minus the logarithm of a sum, as in a cross entropy
that a program writes out.
"""

from __future__ import annotations

from collections.abc import Sequence

from polyamp.values import Value

_REDUCTIONS = {"sum": "sum", "mean": "statistic", "variance": "statistic", "norm": "root"}
_STATISTICS = frozenset({"sum", "statistic", "root", "reciprocal root"})
_ROOTS = {"sqrt": "root", "rsqrt": "reciprocal root"}
_INVERSES = {"root": "reciprocal root", "reciprocal root": "root"}
_MOVES = frozenset({"reshape", "broadcast", "identity"})  # those that cost nothing, in float32 too
_KEEPING = _MOVES | {"add", "sub", "maximum", "minimum", "clip", "where", "transpose", "slice", "gather", "tile", "neg"}
_AFFINE = frozenset({"add", "sub", "mul", "div"})


def statistic(operation: str, inputs: Sequence[Value]) -> str:
    """Return the role of a float32 result if it is a statistic; else an empty string."""
    if operation in _REDUCTIONS:
        return _REDUCTIONS[operation]
    roles = [value.role for value in inputs if value.role in _STATISTICS]
    if any(value.role not in _STATISTICS and value.state != "weak" for value in inputs):
        return ""
    if operation == "rsqrt":  # also of a parameter: the variance that a norm stores for inference is a parameter
        return "reciprocal root"
    if not roles:
        return ""
    if operation in _ROOTS:
        return _ROOTS[operation]
    if operation == "reciprocal" or (operation == "div" and not inputs[0].role):
        return _INVERSES.get(roles[0], "statistic")
    if operation in _KEEPING and len(set(roles)) == 1:
        return roles[0]
    if operation in ("mul", "div") and len(roles) == 1:  # by a number, which turns a sum into a mean
        return roles[0] if roles[0] in _INVERSES else "statistic"
    return "statistic" if operation in _KEEPING | _AFFINE | {"square", "squared_difference", "abs"} else ""


def normalizes(operation: str, inputs: Sequence[Value], gradient: bool = False) -> bool:
    """Return whether an operation is part of a norm that is written out. Its result is low, but kept in float32."""
    low = [value for value in inputs if value.state == "low"]
    statistics = [value for value in inputs if value.role in _STATISTICS]
    others = [value for value in inputs if value.state != "low" and value.role not in _STATISTICS]
    if not low or any(value.state != "weak" for value in others) or (operation == "div" and inputs[0].state != "low"):
        return False
    begun = all(value.role == "normalized" for value in low)
    if not statistics:
        alone = len(low) == 1 or (gradient and operation in ("add", "sub"))
        return begun and alone and operation in _AFFINE | _MOVES
    many = gradient and operation in ("add", "sub")  # sums the gradients of the data and of its statistics
    if (len(low) > 1 and not many) or operation not in _AFFINE:
        return False
    role = statistics[0].role
    allowed = {"mul": role == "reciprocal root", "div": True, "sub": role != "sum", "add": begun and role != "sum"}
    return gradient or allowed[operation]
