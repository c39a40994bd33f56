"""Traps: small programs that float32 computes well, and that 16 bits compute well only with care.

Each is written once, in the words of `support.traps.words`, as ``program(ops, w, x, ...)``: ``w`` is a parameter, all
others are inputs. The factors of ``w`` are exact in float16 and in bfloat16, so losses come only after that product.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

Array = np.ndarray
Program = Callable[..., Any]


class Trap(NamedTuple):
    """A program and its arguments.

    Attributes:
        name: a short name, for tables.
        danger: its problem in 16 bits.
        program: a function of the words, ``w`` and the inputs; its result is floating-point.
        w: the parameter.
        inputs: floating-point, integer and boolean arrays.
        roundings: the allowed distance from float32, in roundings of the format relative to the norm of the result,
            and to that of the gradient.
    """

    name: str
    danger: str
    program: Program
    w: Array
    inputs: tuple[Array, ...]
    roundings: int


def trap(danger: str, w: Array, *inputs: Array, roundings: int = 6) -> Callable[[Program], Trap]:
    """Make a trap from a program, with the program's name."""
    name_of = str.maketrans("_", " ")
    given = tuple(array.astype(np.float32) if array.dtype == np.float64 else array for array in inputs)
    return lambda program: Trap(program.__name__.translate(name_of), danger, program, w, given, roundings)


def in_sixteen_bits(array: Any) -> Array:
    """Round to numbers that both formats have: 8 significant bits."""
    return np.asarray(array, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def normal(*shape: int, seed: int = 0) -> Array:
    return in_sixteen_bits(np.random.default_rng(seed).standard_normal(shape))


def eye(times: float = 1.0, size: int = 16) -> Array:
    """Return a parameter that only scales, by a power of two."""
    return np.eye(size, dtype=np.float32) * np.float32(times)


def beside_zeros(column: Array) -> Array:
    """Return a column and one of zeros, for `FIRST`."""
    return np.concatenate([column, np.zeros_like(column)], 1)


X, Z = normal(8, 16), normal(8, 16, seed=1)
LOGITS = in_sixteen_bits(np.linspace(-12, 12, 128).reshape(8, 16))
LABELS = np.arange(8) * 5 % 16
HITS = (np.arange(128).reshape(8, 16) * 7 % 3 == 0).astype(np.float32)
EYE = eye()
FIRST = eye(size=2)[:, :1]
"""A parameter that takes the first of two columns: of one column the product would sum nothing."""
