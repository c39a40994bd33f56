"""What a trap is: a small program that float32 computes well and 16 bits do not, unless somebody takes care.

Each is written once, in the words of `support.traps.words`, as ``program(ops, w, x, ...)``: ``w`` is a parameter, all
others are inputs. What ``w`` multiplies is exact in float16 and in bfloat16: whatever is lost, is lost after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

Array = np.ndarray
Program = Callable[..., Any]


class Trap(NamedTuple):
    """A program and what it is called with.

    Attributes:
        name: short, as in a table.
        danger: what 16 bits do to it.
        program: of the words, of ``w`` and of the inputs; its result is floating.
        w: the parameter.
        inputs: floating, integer and boolean arrays.
        roundings: how many roundings of the format, one after the other, may part it from float32: of the length of
            its result, and of its gradient.
    """

    name: str
    danger: str
    program: Program
    w: Array
    inputs: tuple[Array, ...]
    roundings: int


def trap(danger: str, w: Array, *inputs: Array, roundings: int = 6) -> Callable[[Program], Trap]:
    """Make a trap of a program, by the program's name."""
    name_of = str.maketrans("_", " ")
    given = tuple(array.astype(np.float32) if array.dtype == np.float64 else array for array in inputs)
    return lambda program: Trap(program.__name__.translate(name_of), danger, program, w, given, roundings)


def in_sixteen_bits(array: Any) -> Array:
    """Round to what both formats have: 8 significant bits."""
    return np.asarray(array, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def normal(*shape: int, seed: int = 0) -> Array:
    return in_sixteen_bits(np.random.default_rng(seed).standard_normal(shape))


def eye(times: float = 1.0, size: int = 16) -> Array:
    """The parameter that only scales, by a power of two."""
    return np.eye(size, dtype=np.float32) * np.float32(times)


X, Z = normal(8, 16), normal(8, 16, seed=1)
LOGITS = in_sixteen_bits(np.linspace(-12, 12, 128).reshape(8, 16))
LABELS = np.arange(8) * 5 % 16
HITS = (np.arange(128).reshape(8, 16) * 7 % 3 == 0).astype(np.float32)
EYE = eye()
