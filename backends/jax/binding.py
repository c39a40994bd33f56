"""Binds one primitive in a format so that its derivative is accurate and keeps few bytes.

JAX derives the backward pass from what is bound: what is summed there, and what is kept for it, is in the formats here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from polyamp.backends.jax import unstable
from polyamp.backends.jax.cells import FLOAT32, Cell

_SPREADING = ("add", "sub", "mul", "div", "max", "min")
_REPEATING = ("broadcast_in_dim", "gather")
_NEEDING_OPERANDS = ("mul", "div", "square", "integer_pow")


def bound_low(equation: Any, cells: Sequence[Cell], dtype: Any, output: Any) -> list[Any]:
    """The results of an equation on its floating inputs in a 16-bit dtype; a product's are added up in ``output``.

    What is spread over rows (a bias, a scale, a gate), and what a gather may take several times, is so in float32: the
    derivative of that is a sum, which in 16 bits would stop growing after some hundreds of terms.
    """
    if equation.primitive.name in _REPEATING and _is_traced(cells[0]):
        return [unstable.converted(array, dtype) for array in unstable.bound(equation, _wide(cells), equation.params)]
    shape, spreads = equation.outvars[0].aval.shape, equation.primitive.name in _SPREADING
    arrays = [_spread(cell, shape, dtype) if spreads else _cast(cell, dtype) for cell in cells]
    preferred = {"preferred_element_type": output} if "preferred_element_type" in equation.params else {}
    return unstable.bound(equation, arrays, {**equation.params, **preferred})


def bound_wide(equation: Any, cells: Sequence[Cell]) -> list[Any]:
    """The results of an equation on its floating inputs in float32.

    Where the derivative needs operands that are in 16 bits, the backward pass keeps those and widens them once more.
    """
    narrow = [cell for cell in cells if _is_traced(cell) and cell.dtype != FLOAT32]
    if not narrow or equation.primitive.name not in _NEEDING_OPERANDS:
        return unstable.bound(equation, _wide(cells), equation.params)

    def widened(*arrays: Any) -> list[Any]:
        given = iter(arrays)
        wide = [unstable.converted(next(given), FLOAT32) if cell in narrow else _cast(cell, FLOAT32) for cell in cells]
        return unstable.bound(equation, wide, equation.params)

    results: list[Any] = jax.checkpoint(widened, prevent_cse=False)(*(cell.array for cell in narrow))
    return results


def _wide(cells: Sequence[Cell]) -> list[Any]:
    return [_cast(cell, FLOAT32) for cell in cells]


def _cast(cell: Cell, dtype: Any) -> Any:
    return cell.cast(dtype) if cell.inexact else cell.array


def _spread(cell: Cell, shape: tuple[Any, ...], dtype: Any) -> Any:
    if not _is_traced(cell) or cell.array.shape == shape:
        return _cast(cell, dtype)
    return unstable.converted(lax.broadcast_in_dim(cell.cast(FLOAT32), shape, range(cell.array.ndim)), dtype)


def _is_traced(cell: Cell) -> bool:
    return cell.inexact and isinstance(cell.array, jax.core.Tracer)
