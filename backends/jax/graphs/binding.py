"""Binds one primitive in a format, so that its derivative is accurate and keeps few bytes.

JAX derives the backward pass from what is bound: its sums, and the arrays that it keeps, have the formats chosen here.
For example, a float16 bias that is added to 512 rows has a sum over 512 rows as its derivative. So the bias is spread
over the rows in float32 first, and then cast: the derivative sums in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from polyamp.backends.jax import unstable
from polyamp.backends.jax.graphs.cells import FLOAT32, Cell
from polyamp.backends.jax.graphs.recipes import Taken, bind, is_traced, take, with_less_kept

_SPREADING = ("add", "sub", "mul", "div", "max", "min")
_REPEATING = ("broadcast_in_dim", "gather")
_NEEDING_OPERANDS = frozenset(
    {"mul", "div", "square", "integer_pow", "pow", "log", "log1p", "sin", "cos", "abs", "max", "min", "erf"}
)
_NEEDING_RESULTS = frozenset({"exp", "tanh", "logistic", "select_n"})  # select_n: zeros for the other case
_SLOPES: dict[str, Callable[[Any], Any]] = {"tanh": lambda y: 1 - y * y, "logistic": lambda y: y * (1 - y)}


def bind_low(equation: Any, cells: Sequence[Cell], dtype: Any, output: Any, *, is_looped: bool) -> list[Any]:
    """Bind an equation with its floating-point inputs in a 16-bit dtype; a product is added up in ``output``."""
    # A value that is spread over rows (a bias, a scale, a gate), or that a gather may take several times, is spread in
    # float32. The derivative of this is a sum, which would stop growing in 16 bits after some hundreds of terms. The
    # body of a loop keeps less for the backward pass, since it keeps it in every iteration.
    if equation.primitive.name in _REPEATING and is_traced(cells[0]):
        return [unstable.converted(array, dtype) for array in unstable.bound(equation, _wide(cells), equation.params)]
    if is_looped and equation.primitive.name in _SLOPES:
        return [_saturated(equation, cells[0].cast(dtype))]
    shape, spreads = equation.outvars[0].aval.shape, equation.primitive.name in _SPREADING
    arrays = [_spread(cell, shape, dtype) if spreads else _cast(cell, dtype) for cell in cells]
    preferred = {"preferred_element_type": output} if "preferred_element_type" in equation.params else {}
    return unstable.bound(equation, arrays, {**equation.params, **preferred})


def _saturated(equation: Any, array: Any) -> Any:
    """Bind a function whose derivative is computed from its result, so that the backward pass keeps only the result."""
    # Behind the barrier XLA computes the argument once, and not again for every result that is kept.
    slope = _SLOPES[equation.primitive.name]

    def times_slope(result: Any, tangent: Any) -> Any:
        result_32, tangent_32 = (unstable.converted(one, FLOAT32) for one in (result, tangent))
        return unstable.converted(tangent_32 * slope(result_32), result.dtype)

    @jax.custom_jvp
    def own(array: Any) -> Any:
        return unstable.bound(equation, [array], equation.params)[0]

    @own.defjvp
    def _(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
        result = own(*primals)
        return result, jax.checkpoint(times_slope, prevent_cse=False)(result, *tangents)

    return own(lax.optimization_barrier(array))  # type: ignore[no-untyped-call]


def bind_wide(equation: Any, cells: Sequence[Cell], anew: Sequence[str] = ()) -> list[Any]:
    """Bind an equation with its floating-point inputs in float32; inputs with the roles ``anew`` are computed again."""
    # If the derivative needs operands that are in 16 bits, or that were computed from 16-bit arrays, the backward pass
    # keeps the 16-bit arrays and widens them once more.
    inputs, name = take(cells, anew), equation.primitive.name
    if name in _NEEDING_OPERANDS or name in _NEEDING_RESULTS:
        smaller = list(map(with_less_kept, inputs))
        inputs = smaller if name in _NEEDING_OPERANDS or any(map(_is_smaller, smaller)) else inputs
    if not any(taken.is_anew or _is_smaller(taken) or _is_narrow(taken, name) for taken in inputs):
        return unstable.bound(equation, _wide(cells), equation.params)
    return bind(lambda arrays: unstable.bound(equation, arrays, equation.params), inputs)


def _is_smaller(taken: Taken) -> bool:
    return taken.leaves != [taken.cell]


def _is_narrow(taken: Taken, name: str) -> bool:
    return name in _NEEDING_OPERANDS and is_traced(taken.cell) and taken.cell.dtype != taken.cell.declared


def _wide(cells: Sequence[Cell]) -> list[Any]:
    return [_cast(cell, FLOAT32) for cell in cells]


def _cast(cell: Cell, dtype: Any) -> Any:
    return cell.cast(dtype) if cell.inexact else cell.array


def _spread(cell: Cell, shape: tuple[Any, ...], dtype: Any) -> Any:
    if not is_traced(cell) or cell.array.shape == shape:
        return _cast(cell, dtype)
    return unstable.converted(lax.broadcast_in_dim(cell.cast(FLOAT32), shape, range(cell.array.ndim)), dtype)
