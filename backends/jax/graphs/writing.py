"""Binds one primitive in a format, so that its derivative is accurate and keeps few bytes.

JAX derives the backward pass from what is bound, so its sums, and the arrays that it keeps, have the formats set here.
For example, a float16 bias that is added to 512 rows has a sum over 512 rows as its derivative. So the bias is spread
over the rows in float32 first, and then cast: the derivative sums in float32.

A value has a recipe: how it was computed, so that operations in float32 can compute it again, for two reasons.

- A logarithm must not take a value that was rounded, such as a sigmoid close to 1. In ``log(1 - sigmoid(x @ w))`` the
  sigmoid and the difference are computed again in float32, from the float16 product. The product is a *leaf*.
- The backward pass can need a float32 value that was computed from 16-bit arrays. It keeps these arrays, which are half
  as large and often kept anyway, and computes the value again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from polyamp.backends.jax import casting, unstable
from polyamp.backends.jax.graphs.cells import FLOAT32, CallResult, Cell, Recipe

_CHEAP = frozenset(
    {"add", "sub", "mul", "div", "neg", "abs", "exp", "max", "min", "clamp", "select_n", "square", "integer_pow"}
    | {"sqrt", "rsqrt", "logistic", "tanh", "erf", "broadcast_in_dim", "reshape", "squeeze", "copy"}
)
# The roles of values that may be computed again, and of their inputs that are then computed again too. An average is of
# rounded values.
_STEPS = ("saturated", "pointwise")
_ANEW = {"saturated": _STEPS, "pointwise": _STEPS, "average": ("average",)}
_DEPTH = 8


def note_equation(equation: Any, cells: Sequence[Cell], results: Sequence[Cell], anew: Sequence[str]) -> None:
    """Record how the result of an equation was computed, if an operation can need it again."""
    if len(results) == 1 and (equation.primitive.name in _CHEAP or results[0].value.role in _ANEW):
        results[0].recipe = Recipe(equation, cells, anew)


def note_call(results: Sequence[Cell], again: Callable[[], Sequence[Cell]]) -> None:
    """Record how to compute the results of a call again: ``again`` returns them, and is called at most once."""
    found: list[Cell] = []

    def result(index: int) -> Cell:
        if not found:
            found.extend(again())
        return found[index]

    for index, cell in enumerate(results):
        if cell.value.role in _ANEW:
            cell.recipe = CallResult(result, index)


def is_traced(cell: Cell) -> bool:
    """Return whether a value is floating-point (or complex) and traced."""
    return cell.inexact and casting.is_traced(cell.array)


def compute_again(cell: Cell) -> Any:
    """Return a value in float32: cast, or computed again if it was rounded and has one of the roles ``_STEPS``."""
    taken = _take(cell, _STEPS)
    return bind(lambda arrays: arrays, [taken])[0] if taken.is_anew else cell.cast(FLOAT32)


class Taken(NamedTuple):
    """How a float32 operation takes one of its inputs."""

    cell: Cell  # the input
    leaves: list[Cell]  # the values to compute the input from; only the input itself if it is not computed again
    is_anew: bool = False  # whether the derivative goes through the leaves, because the rounded value is not used


def _take(cell: Cell, roles: Sequence[str]) -> Taken:
    """Return an input as an operation takes it: a low value of one of these roles is computed again in float32."""
    if cell.value.state == "low" and cell.value.role in roles and _recipe(cell) is not None:
        return Taken(cell, _distinct(_leaves_anew(cell, _ANEW[cell.value.role])), is_anew=True)
    return Taken(cell, [cell])


def with_less_kept(taken: Taken) -> Taken:
    """Return the same input, computed from smaller arrays if there are any: the backward pass then keeps these."""
    if taken.is_anew or not is_traced(taken.cell) or taken.cell.dtype != FLOAT32:
        return taken
    return taken._replace(leaves=_smallest(taken.cell, _DEPTH))


def bind(operation: Callable[[list[Any]], list[Any]], inputs: Sequence[Taken]) -> list[Any]:
    """Bind an operation in float32; for the backward pass only ``Taken.leaves`` of inputs are kept."""
    # All users of an input that is not computed again share one array. Its derivative goes to this array, where the
    # gradients of all users add up in float32. The value of the input is computed from the leaves.
    leaves = _distinct(leaf for taken in inputs for leaf in taken.leaves)
    kept = [leaf for leaf in leaves if casting.is_traced(leaf.array)]
    users = (leaf for taken in inputs for leaf in (taken.leaves if taken.is_anew else [taken.cell]))
    # Derivatives can pass the kept array of a value if it is the one that its users share.
    shared = [one for one in _distinct(users) if is_traced(one) and not (one.dtype == one.declared and one in kept)]
    known = [leaf for leaf in leaves if not casting.is_traced(leaf.array)]
    numbers = {id(leaf): leaf.cast(FLOAT32) if leaf.declared == FLOAT32 else leaf.array for leaf in known}

    def again(arrays: Sequence[Any], wide: Sequence[Any]) -> list[Any]:
        originals = {id(cell): array for cell, array in zip(shared, wide, strict=True)}
        values = {id(cell): _widened(cell, array) for cell, array in zip(kept, arrays, strict=True)}
        return operation([_computed(taken, values | numbers, originals) for taken in inputs])

    wide = [cell.cast(FLOAT32 if cell.declared == FLOAT32 else cell.dtype) for cell in shared]
    if not kept:
        return again([], wide)
    results: list[Any] = jax.checkpoint(again, prevent_cse=False)([leaf.array for leaf in kept], wide)
    return results


def _computed(taken: Taken, values: dict[int, Any], originals: dict[int, Any]) -> Any:
    """Return an input computed from its leaves, with the derivative of its original."""
    known = {id(leaf): values[id(leaf)] for leaf in taken.leaves}
    if taken.is_anew or id(taken.cell) in known:
        return _value(taken.cell, {key: _with_gradient(array, originals.get(key)) for key, array in known.items()})
    # The gradient does not go to the leaves, unless JAX transposes this: then the value is linear, such as a tangent.
    return _with_gradient(_value(taken.cell, known), originals.get(id(taken.cell)))


def _value(cell: Cell, known: dict[int, Any]) -> Any:
    """Return a value in float32, computed from known values."""
    if id(cell) not in known:
        recipe = _recipe(cell)
        assert recipe is not None  # otherwise it is one of the leaves
        inputs = [_value(source, known) for source in recipe.cells]
        known[id(cell)] = unstable.bound(recipe.equation, inputs)[0]
    return known[id(cell)]


@jax.custom_jvp
def _gradient_of(value: Any, original: Any) -> Any:
    return value


@_gradient_of.defjvp
def _tangent(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    return primals[0], tangents[1]


def _with_gradient(value: Any, original: Any) -> Any:
    """Return a value with the derivative of another array that holds the same numbers."""
    return value if original is None else _gradient_of(value, original)


def _widened(cell: Cell, array: Any) -> Any:
    is_narrow = cell.declared == FLOAT32 and cell.dtype != FLOAT32
    return unstable.converted(array, FLOAT32) if is_narrow else array


def _recipe(cell: Cell) -> Recipe | None:
    while isinstance(cell.recipe, CallResult):
        called = cell.recipe
        cell.recipe = called.result(called.place).recipe
    return cell.recipe


def _leaves_anew(cell: Cell, roles: Sequence[str]) -> list[Cell]:
    recipe = _recipe(cell) if cell.value.state == "low" and cell.value.role in roles else None
    return [cell] if recipe is None else [leaf for source in recipe.cells for leaf in _leaves_anew(source, roles)]


def _smallest(cell: Cell, depth: int) -> list[Cell]:
    """Return the smaller values from which a float32 value can be computed; the value itself if there are none."""
    recipe = cell.recipe if cell.dtype == FLOAT32 and depth else None
    if not isinstance(recipe, Recipe) or recipe.equation.primitive.name not in _CHEAP:
        return [cell]
    sources = ((source, _take(source, recipe.anew)) for source in recipe.cells)
    parts = (taken.leaves if taken.is_anew else _smallest(source, depth - 1) for source, taken in sources)
    leaves = _distinct(leaf for part in parts for leaf in part)
    traced = [leaf for leaf in leaves if casting.is_traced(leaf.array)]
    return leaves if sum(map(_bytes, traced)) < _bytes(cell) else [cell]


def _bytes(cell: Cell) -> float:
    shape = cell.array.shape
    known = all(isinstance(length, int) for length in shape)
    return math.prod(shape) * cell.array.dtype.itemsize if known else math.inf


def _distinct(cells: Iterable[Cell]) -> list[Cell]:
    return list({id(cell): cell for cell in cells}.values())


_SPREADING = ("add", "sub", "mul", "div", "max", "min")
_REPEATING = ("broadcast_in_dim", "gather")
_NEEDING_OPERANDS = frozenset(
    {"mul", "div", "square", "integer_pow", "pow", "log", "log1p", "sin", "cos", "abs", "max", "min", "erf"}
    | {"atan", "atan2"}
)
_NEEDING_RESULTS = frozenset({"exp", "tanh", "logistic", "select_n"})  # select_n: zeros for the other case
_SLOPES: dict[str, Callable[[Any], Any]] = {"tanh": lambda y: 1 - y * y, "logistic": lambda y: y * (1 - y)}


def bind_low(equation: Any, cells: Sequence[Cell], dtype: Any, *, is_looped: bool) -> list[Any]:
    """Bind an equation with its floating-point inputs in a 16-bit dtype."""
    # A value that is spread over rows (a bias, a scale, a gate), or that a gather may take several times, is spread in
    # float32. The derivative of this is a sum, which would stop growing in 16 bits after some hundreds of terms. The
    # body of a loop keeps less for the backward pass, since it keeps it in every iteration.
    if equation.primitive.name in _REPEATING and is_traced(cells[0]):
        return [unstable.converted(array, dtype) for array in unstable.bound(equation, _wide(cells))]
    if is_looped and equation.primitive.name in _SLOPES:
        return [_saturated(equation, cells[0].cast(dtype))]
    shape, spreads = equation.outvars[0].aval.shape, equation.primitive.name in _SPREADING
    arrays = [_spread(cell, shape, dtype) if spreads else _cast(cell, dtype) for cell in cells]
    if equation.primitive.name in _DERIVED and any(map(is_traced, cells)):
        return [_DERIVED[equation.primitive.name](*arrays)]
    preferred = {"preferred_element_type": dtype} if "preferred_element_type" in equation.params else {}
    return unstable.bound(equation, arrays, {**equation.params, **preferred})


@jax.custom_jvp
def _quotient(a: Any, b: Any) -> Any:
    return lax.div(a, b)


@functools.partial(_quotient.defjvp, symbolic_zeros=True)
def _quotient_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    # JAX has b ** -2 in the derivative of a / b, which leaves float16 for any b above 256 or below 0.004.
    b, (da, db), quotient = primals[1], tangents, _quotient(*primals)
    if isinstance(db, SymbolicZero):
        return quotient, _quotient(da, b)
    if isinstance(da, SymbolicZero):
        return quotient, _in_float32(lambda q, b, db: -q * db / b)(quotient, b, db)
    return quotient, _in_float32(lambda q, b, da, db: (da - q * db) / b)(quotient, b, da, db)


def _extreme(choose: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a maximum or minimum whose derivative adds nothing to the gradient of the operand that is not chosen."""
    # JAX multiplies the gradient by 0 there, which is NaN if the gradient is beyond float16, as 1 / (max(x, 0) + 1e-5).
    extreme = jax.custom_jvp(choose)

    @extreme.defjvp
    def _(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
        (a, b), (da, db) = primals, tangents
        result = extreme(a, b)
        return result, jnp.where(a == b, (da + db) / 2, jnp.where(result == a, da, db))

    return extreme


_DERIVED: dict[str, Any] = {"div": _quotient, "max": _extreme(lax.max), "min": _extreme(lax.min)}


def _in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of 16-bit arrays that computes in float32; the backward pass keeps the 16-bit arrays."""

    def own(*arrays: Any) -> Any:
        result = function(*(unstable.converted(array, FLOAT32) for array in arrays))
        return unstable.converted(result, arrays[0].dtype)

    return jax.checkpoint(own, prevent_cse=False)


def _saturated(equation: Any, array: Any) -> Any:
    """Bind a function whose derivative is computed from its result, so that the backward pass keeps only the result."""
    # Behind the barrier XLA computes the argument once, and not again for every result that is kept.
    slope = _SLOPES[equation.primitive.name]

    @jax.custom_jvp
    def own(array: Any) -> Any:
        return unstable.bound(equation, [array])[0]

    @own.defjvp
    def _(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
        result = own(*primals)
        return result, _in_float32(lambda result, tangent: tangent * slope(result))(result, *tangents)

    return own(lax.optimization_barrier(array))  # type: ignore[no-untyped-call]


def bind_wide(equation: Any, cells: Sequence[Cell], anew: Sequence[str] = ()) -> list[Any]:
    """Bind an equation with its floating-point inputs in float32; inputs with the roles ``anew`` are computed again."""
    # If the derivative needs operands that are in 16 bits, or that were computed from 16-bit arrays, the backward pass
    # keeps the 16-bit arrays and widens them once more.
    inputs, name = [_take(cell, anew) for cell in cells], equation.primitive.name
    if name in _NEEDING_OPERANDS or name in _NEEDING_RESULTS:
        smaller = list(map(with_less_kept, inputs))
        inputs = smaller if name in _NEEDING_OPERANDS or any(map(_is_smaller, smaller)) else inputs
    is_narrow = name in _NEEDING_OPERANDS and any(is_traced(cell) and cell.dtype != cell.declared for cell in cells)
    if not is_narrow and not any(taken.is_anew or _is_smaller(taken) for taken in inputs):
        return unstable.bound(equation, _wide(cells))
    return bind(lambda arrays: unstable.bound(equation, arrays), inputs)


def _is_smaller(taken: Taken) -> bool:
    return taken.leaves != [taken.cell]


def _wide(cells: Sequence[Cell]) -> list[Any]:
    return [_cast(cell, FLOAT32) for cell in cells]


def _cast(cell: Cell, dtype: Any) -> Any:
    return cell.cast(dtype) if cell.inexact else cell.array


def _spread(cell: Cell, shape: tuple[Any, ...], dtype: Any) -> Any:
    if not is_traced(cell) or cell.array.shape == shape:
        return _cast(cell, dtype)
    return unstable.converted(lax.broadcast_in_dim(cell.cast(FLOAT32), shape, range(cell.array.ndim)), dtype)
