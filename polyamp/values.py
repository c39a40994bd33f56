"""What the flow rule knows of a floating value: its state, and what else of it decides later operations."""

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
    """What the flow rule knows of one floating value.

    Attributes:
        state: one of `STATES`.
        maker: the canonical operation, or the declared type, that the state comes from; empty for a ``weak`` value.
        unfit: why the compute format cannot hold it; empty where it can.
        role: one of `ROLES`, or empty.
    """

    state: str = "weak"
    maker: str = ""
    unfit: str = ""
    role: str = ""


WEAK = Value()
INPUT = Value("input")
CARRIED = Value("strong", "a loop")
"""A float32 value that a loop carries from turn to turn: it may add up there, which 16 bits would lose."""


def constant(magnitudes: Iterable[float], compute: str) -> Value:
    """Return what is known of a constant.

    >>> constant([1e-8], "float16").unfit
    'constant 1e-08 is lost in float16'
    >>> constant([1 - 1e-7], "bfloat16").unfit
    'constant 0.9999999 is 1 in bfloat16'
    >>> constant([1e-8], "bfloat16")
    Value(state='weak', maker='', unfit='', role='')

    Args:
        magnitudes: of its elements, those that have to be held: for a scalar its own; for an array the largest finite
            one, since tiny elements next to large ones may round to 0.
        compute: the format of ``lower`` operations.
    """
    target = format_of(compute)
    unfit = next((magnitude for magnitude in magnitudes if not target.holds(magnitude)), None)
    if unfit is None:
        return Value()
    if target.is_one(abs(unfit)):
        return Value(unfit=f"constant {unfit:.8g} is 1 in {target.name}")
    return Value(unfit=f"constant {unfit:.4g} is {'beyond' if abs(unfit) > 1 else 'lost in'} {target.name}")


def magnitude(values: Any) -> float:
    """Return what of a constant must fit a format: all of a scalar, the largest finite element of an array.

    >>> import numpy
    >>> magnitude(numpy.array([1.0, -3.0, numpy.inf])), magnitude(-1e9)
    (3.0, -1000000000.0)

    Args:
        values: a number, or what NumPy takes as an array.
    """
    import numpy

    array = numpy.asarray(values)
    if array.size == 1:
        return float(array.reshape(()))
    return float(numpy.max(numpy.abs(array), initial=0, where=numpy.isfinite(array)))
