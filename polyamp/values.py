"""The facts that the flow rule records about a floating value: its state, and others that later decisions need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from polyamp.formats import format_of

STATES: dict[str, str] = {
    "weak": "float32 only because it was declared so: a parameter, a constant",
    "input": "float32 data of the user's: a mask, labels, targets, positions",
    "low": "in the compute format",
    "strong": "float32 because full work made it",
    "other": "of another type, which the user chose: float64, 16 bits of the user's own, complex",
}

ROLES: dict[str, str] = {
    "sum": "a strong value: a sum over axes",
    "statistic": "a strong value: a mean, or what was computed of statistics alone",
    "root": "a strong value: the root of a statistic, such as a norm or a standard deviation",
    "reciprocal root": "a strong value: one over such a root",
    "normalized": "a low value that is still held in float32, between a norm's mean and the end of its affine part",
    "saturated": "a low value: a function that comes close to 0 or 1 and stays there, such as a sigmoid, or 1 minus it",
    "pointwise": "a low value: a cheap function of one low value, such as abs",
}


class Value(NamedTuple):
    """The facts that the flow rule records about one floating value."""

    state: str = "weak"  # one of `STATES`
    # the canonical operation, or the declared type, that the state comes from; empty for a ``weak`` value
    maker: str = ""
    unfit: str = ""  # why the compute format cannot hold the value; empty if it can
    role: str = ""  # one of `ROLES`, or empty


WEAK = Value()
INPUT = Value("input")
CARRIED = Value("strong", "a loop")
"""A float32 value that a loop carries over its iterations. It may be a sum, which in 16 bits loses small terms."""


def constant(magnitudes: Iterable[float], compute: str) -> Value:
    """Return the facts about a constant."""
    target = format_of(compute)
    unfit = next((magnitude for magnitude in magnitudes if not target.holds(magnitude)), None)
    if unfit is None:
        return Value()
    if target.is_one(abs(unfit)):
        return Value(unfit=f"constant {unfit:.8g} is 1 in {target.name}")
    return Value(unfit=f"constant {unfit:.4g} is {'beyond' if abs(unfit) > 1 else 'lost in'} {target.name}")


def magnitude(values: Any) -> float:
    """Return the number that a format must hold: a scalar itself, or the largest finite magnitude in an array."""
    import numpy

    array = numpy.asarray(values)
    if array.size == 1:
        return float(array.reshape(()))
    return float(numpy.max(numpy.abs(array), initial=0, where=numpy.isfinite(array)))
