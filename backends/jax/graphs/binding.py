"""Binds one primitive in a format so that its derivative is accurate and keeps few bytes.

JAX derives the backward pass from what is bound: what is summed there, and what is kept for it, is in the formats here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from polyamp.backends.jax import unstable
from polyamp.backends.jax.graphs.cells import FLOAT32, Cell
from polyamp.backends.jax.graphs.recipes import Taken, bound, is_traced, taken_by, with_less_kept

_SPREADING = ("add", "sub", "mul", "div", "max", "min")
_REPEATING = ("broadcast_in_dim", "gather")
_NEEDING_OPERANDS = frozenset(
    {"mul", "div", "square", "integer_pow", "pow", "log", "log1p", "sin", "cos", "abs", "max", "min", "erf"}
)
_NEEDING_RESULTS = frozenset({"exp", "tanh", "logistic", "select_n"})  # of select_n, the zeros of the other case
_SLOPES: dict[str, Callable[[Any], Any]] = {"tanh": lambda y: 1 - y * y, "logistic": lambda y: y * (1 - y)}


def bound_low(equation: Any, cells: Sequence[Cell], dtype: Any, output: Any, *, is_looped: bool) -> list[Any]:
    """The results of an equation on its floating inputs in a 16-bit dtype; a product's are added up in ``output``.

    What is spread over rows (a bias, a scale, a gate), and what a gather may take several times, is so in float32: the
    derivative of that is a sum, which in 16 bits would stop growing after some hundreds of terms. In the body of a
    loop, where what the backward pass needs is written down in every turn, less of it is kept.
    """
    if equation.primitive.name in _REPEATING and is_traced(cells[0]):
        return [unstable.converted(array, dtype) for array in unstable.bound(equation, _wide(cells), equation.params)]
    if is_looped and equation.primitive.name in _SLOPES:
        return [_saturated(equation, cells[0].cast(dtype))]
    shape, spreads = equation.outvars[0].aval.shape, equation.primitive.name in _SPREADING
    arrays = [_spread(cell, shape, dtype) if spreads else _cast(cell, dtype) for cell in cells]
    preferred = {"preferred_element_type": output} if "preferred_element_type" in equation.params else {}
    return unstable.bound(equation, arrays, {**equation.params, **preferred})


def _saturated(equation: Any, array: Any) -> Any:
    """A function whose derivative is computed of its result: kept for the backward pass is that alone.

    Behind the barrier, XLA computes its argument once, and not again for every result that is written down.
    """
    slope = _SLOPES[equation.primitive.name]

    def times_slope(result: Any, tangent: Any) -> Any:
        wide, of_it = (unstable.converted(one, FLOAT32) for one in (result, tangent))
        return unstable.converted(of_it * slope(wide), result.dtype)

    @jax.custom_jvp
    def own(array: Any) -> Any:
        return unstable.bound(equation, [array], equation.params)[0]

    @own.defjvp
    def _(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
        result = own(*primals)
        return result, jax.checkpoint(times_slope, prevent_cse=False)(result, *tangents)

    return own(lax.optimization_barrier(array))  # type: ignore[no-untyped-call]


def bound_wide(equation: Any, cells: Sequence[Cell], anew: Sequence[str] = ()) -> list[Any]:
    """The results of an equation on its floating inputs in float32, those of the roles ``anew`` computed again.

    Where the derivative needs operands that are in 16 bits, or were computed of such, the backward pass keeps those and
    widens them once more.
    """
    inputs, name = taken_by(cells, anew), equation.primitive.name
    if name in _NEEDING_OPERANDS or name in _NEEDING_RESULTS:
        smaller = list(map(with_less_kept, inputs))
        inputs = smaller if name in _NEEDING_OPERANDS or any(map(_is_smaller, smaller)) else inputs
    if not any(taken.is_anew or _is_smaller(taken) or _is_narrow(taken, name) for taken in inputs):
        return unstable.bound(equation, _wide(cells), equation.params)
    return bound(lambda arrays: unstable.bound(equation, arrays, equation.params), inputs)


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
