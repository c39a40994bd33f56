"""How values were computed, so that work in float32 can compute them again.

There are two reasons to. A value that was rounded, such as a sigmoid close to 1, is not what a logarithm may take: it
is computed again in float32, from what it was computed of. And what the backward pass needs of a float32 value can be
computed again from the 16-bit arrays that it was made of, which are half as large, and kept in any case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from polyamp.backends.jax import unstable
from polyamp.backends.jax.graphs.cells import FLOAT32, Cell

_CHEAP = frozenset(
    {"add", "sub", "mul", "div", "neg", "abs", "exp", "max", "min", "clamp", "select_n", "square", "integer_pow"}
    | {"sqrt", "rsqrt", "logistic", "tanh", "erf", "broadcast_in_dim", "reshape", "squeeze", "copy"}
)
_ANEW = ("saturated", "pointwise")
_DEPTH = 8


class Recipe(NamedTuple):
    """An equation, of which the value is the only output.

    Attributes:
        cells: its inputs.
        anew: the roles of inputs that it took computed again.
    """

    equation: Any
    cells: Sequence[Cell]
    anew: Sequence[str] = ()


def noted(equation: Any, cells: Sequence[Cell], results: Sequence[Cell], anew: Sequence[str]) -> None:
    """Write down how the result of an equation was computed, where it may have to be computed again."""
    if len(results) == 1 and (equation.primitive.name in _CHEAP or results[0].value.role in _ANEW):
        results[0].recipe = Recipe(equation, cells, anew)


def noted_call(results: Sequence[Cell], again: Callable[[], Sequence[Cell]]) -> None:
    """Write down how results of a call were computed: ``again`` runs its equations in its place, and is run once."""
    found: list[Cell] = []

    def result(place: int) -> Cell:
        if not found:
            found.extend(again())
        return found[place]

    for place, cell in enumerate(results):
        if cell.value.role in _ANEW:
            cell.recipe = Again(result, place)


class Again(NamedTuple):
    """A result of a call, whose recipe is known once the call is run in its place."""

    result: Callable[[int], Cell]
    place: int


def is_traced(cell: Cell) -> bool:
    """Whether a floating value has no number yet."""
    return cell.inexact and _is_tracer(cell)


def _is_tracer(cell: Cell) -> bool:
    return isinstance(cell.array, jax.core.Tracer)


def anew(cell: Cell, roles: Iterable[str] = _ANEW) -> Any:
    """A value in float32, computed again if it has one of these roles."""
    (taken,) = taken_by([cell], tuple(roles))
    return bound(lambda arrays: arrays, [taken])[0] if taken.is_anew else cell.cast(FLOAT32)


class Taken(NamedTuple):
    """How float32 work takes one of its inputs.

    Attributes:
        cell: the input.
        leaves: the values that it is computed of again; itself alone where it is taken as it is.
        is_anew: whether its own derivative is taken through these, since what was rounded is not used at all.
    """

    cell: Cell
    leaves: list[Cell]
    is_anew: bool = False


def taken_by(cells: Sequence[Cell], roles: Sequence[str] = ()) -> list[Taken]:
    """How these inputs are taken by work that must not have those of some roles as they were rounded."""
    return [_taken(cell, roles) for cell in cells]


def _taken(cell: Cell, roles: Sequence[str]) -> Taken:
    if cell.value.state == "low" and cell.value.role in roles and _recipe(cell) is not None:
        return Taken(cell, _distinct(_leaves_anew(cell)), is_anew=True)
    return Taken(cell, [cell])


def with_less_kept(taken: Taken) -> Taken:
    """The same, of smaller arrays where there are some."""
    if taken.is_anew or not is_traced(taken.cell) or taken.cell.dtype != FLOAT32:
        return taken
    return taken._replace(leaves=_smallest(taken.cell, _DEPTH))


def bound(operation: Callable[[list[Any]], list[Any]], inputs: Sequence[Taken]) -> list[Any]:
    """What an operation on float32 arrays gives; of its inputs the backward pass keeps their leaves.

    The derivative of an input that is taken as it is goes to the array that all its users share, so that their
    gradients add up in float32; its value there is computed of the leaves.
    """
    kept = [leaf for leaf in _distinct(leaf for taken in inputs for leaf in taken.leaves) if _is_tracer(leaf)]
    users = (leaf for taken in inputs for leaf in (taken.leaves if taken.is_anew else [taken.cell]))
    shared = [cell for cell in _distinct(users) if is_traced(cell) and not _is_itself(cell, kept)]
    numbers = {id(leaf): _number(leaf) for taken in inputs for leaf in taken.leaves if not _is_tracer(leaf)}

    def again(arrays: Sequence[Any], wide: Sequence[Any]) -> list[Any]:
        originals = {id(cell): array for cell, array in zip(shared, wide, strict=True)}
        values = {id(cell): _widened(cell, array) for cell, array in zip(kept, arrays, strict=True)}
        return operation([_computed(taken, values | numbers, originals) for taken in inputs])

    wide = [cell.cast(FLOAT32 if cell.declared == FLOAT32 else cell.dtype) for cell in shared]
    if not kept:
        return again([], wide)
    results: list[Any] = jax.checkpoint(again, prevent_cse=False)([leaf.array for leaf in kept], wide)
    return results


def _is_itself(cell: Cell, kept: Sequence[Cell]) -> bool:
    """Whether a value is kept as the array that its users share, so that derivatives may go through it."""
    return cell.dtype == cell.declared and any(cell is leaf for leaf in kept)


def _computed(taken: Taken, values: dict[int, Any], originals: dict[int, Any]) -> Any:
    """An input of its leaves, with the derivative of its original."""
    known = {id(leaf): values[id(leaf)] for leaf in taken.leaves}
    if taken.is_anew or id(taken.cell) in known:
        return _value(taken.cell, {key: _with_gradient(array, originals.get(key)) for key, array in known.items()})
    own = _value(taken.cell, {key: lax.stop_gradient(array) for key, array in known.items()})
    return _with_gradient(own, originals.get(id(taken.cell)))


def _number(cell: Cell) -> Any:
    return cell.cast(FLOAT32) if cell.declared == FLOAT32 else cell.array


def _value(cell: Cell, known: dict[int, Any]) -> Any:
    """A value in float32, computed of those that are known."""
    if id(cell) not in known:
        recipe = _recipe(cell)
        assert recipe is not None  # else it would be one of the leaves
        inputs = [_value(source, known) for source in recipe.cells]
        known[id(cell)] = unstable.bound(recipe.equation, inputs, recipe.equation.params)[0]
    return known[id(cell)]


@jax.custom_jvp
def _gradient_of(value: Any, original: Any) -> Any:
    return value


@_gradient_of.defjvp
def _tangent(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    return primals[0], tangents[1]


def _with_gradient(value: Any, original: Any) -> Any:
    """A value with the derivative of another array that holds the same."""
    return value if original is None else _gradient_of(value, original)


def _widened(cell: Cell, array: Any) -> Any:
    is_narrow = cell.declared == FLOAT32 and cell.dtype != FLOAT32
    return unstable.converted(array, FLOAT32) if is_narrow else array


def _recipe(cell: Cell) -> Recipe | None:
    while isinstance(cell.recipe, Again):
        called = cell.recipe
        cell.recipe = called.result(called.place).recipe
    return cell.recipe


def _leaves_anew(cell: Cell) -> list[Cell]:
    recipe = _recipe(cell) if cell.value.state == "low" and cell.value.role in _ANEW else None
    return [cell] if recipe is None else [leaf for source in recipe.cells for leaf in _leaves_anew(source)]


def _smallest(cell: Cell, depth: int) -> list[Cell]:
    """The values that one in float32 can be computed of, if they are smaller than it is; else itself."""
    recipe = cell.recipe if cell.dtype == FLOAT32 and depth else None
    if not isinstance(recipe, Recipe) or recipe.equation.primitive.name not in _CHEAP:
        return [cell]
    sources = ((source, _taken(source, recipe.anew)) for source in recipe.cells)
    parts = (taken.leaves if taken.is_anew else _smallest(source, depth - 1) for source, taken in sources)
    leaves = _distinct(leaf for part in parts for leaf in part)
    traced = [leaf for leaf in leaves if _is_tracer(leaf)]
    return leaves if sum(map(_bytes, traced)) < _bytes(cell) else [cell]


def _bytes(cell: Cell) -> float:
    shape = cell.array.shape
    known = all(isinstance(length, int) for length in shape)
    return math.prod(shape) * cell.array.dtype.itemsize if known else math.inf


def _distinct(cells: Iterable[Cell]) -> list[Cell]:
    return list({id(cell): cell for cell in cells}.values())
