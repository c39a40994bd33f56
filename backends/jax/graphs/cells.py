"""Values while a program runs again: an array in some dtype, together with the dtype that its program declared.

For example, ``x @ w`` under ``mixed_float16`` is a cell whose array is float16, whose declared dtype is float32, and
whose state for the flow rule is low. `Cell.restored` is its array in float32, as the program expects it at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.backends.jax.unstable import converted
from polyamp.flow import WEAK, Value

FLOAT32 = np.dtype("float32")


@functools.cache
def is_inexact(dtype: Any) -> bool:
    """Return whether a dtype is floating-point or complex; False for None."""
    return dtype is not None and jnp.issubdtype(dtype, np.inexact)


def declared_value(dtype: Any) -> Value:
    """Return the flow rule's facts about a value, from its declared dtype alone."""
    return WEAK if dtype == FLOAT32 or not is_inexact(dtype) else Value("other", np.dtype(dtype).name)


@jax.tree_util.register_pytree_node_class
@dataclass(eq=False, slots=True)
class Cell:
    """One value: a pytree of one array, so that JAX's own control flow accepts cells."""

    array: Any
    dtype: Any  # of the array
    declared: Any  # the dtype that the program declared
    value: Value  # the facts of the flow rule
    shared: bool = False  # whether casts are kept for other uses
    recipe: Recipe | CallResult | None = None  # how it was computed
    casts: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, array: Any, declared: Any, value: Value | None = None) -> Cell:
        """Return the cell of an array in its declared dtype; ``value`` has the facts about a float32 array."""
        known = declared_value(declared) if value is None or declared != FLOAT32 else value
        return cls(array, declared, declared, known)

    def tree_flatten(self) -> tuple[tuple[Any], tuple[Any, ...]]:
        """Return the array, and everything else that can be compared as static data."""
        return (self.array,), (self.dtype, self.declared, self.value, self.shared)

    @classmethod
    def tree_unflatten(cls, about: tuple[Any, ...], arrays: tuple[Any]) -> Cell:
        """Return a cell with another array."""
        return cls(arrays[0], *about)

    @property
    def inexact(self) -> bool:
        """Whether the value is floating-point or complex."""
        return is_inexact(self.declared)

    def within(self) -> Cell:
        """Return the value for the body of a loop, a branch or a rule, which does not share casts made outside."""
        return self.around(self.array)

    def around(self, array: Any) -> Cell:
        """Return a cell with another array and the same facts."""
        return Cell(array, self.dtype, self.declared, self.value, self.shared)

    def cast(self, dtype: Any) -> Any:
        """Return the array in a dtype; None leaves it as it is."""
        if dtype == self.dtype or dtype is None:
            return self.array
        if not self.shared:
            return converted(self.array, dtype)
        if dtype not in self.casts:
            self.casts[dtype] = converted(self.array, dtype)
        return self.casts[dtype]

    def restored(self) -> Any:
        """Return the array in its declared dtype."""
        return self.cast(self.declared)

    def low(self, dtype: Any, value: Value) -> Cell:
        """Return a model of the same value in 16 bits; ``value`` names the operation that makes it."""
        return Cell(self.array, dtype, self.declared, Value("low", value.maker), shared=True)

    @property
    def format(self) -> Any:
        """A key for the format of the cell. Arguments with equal keys can share a rewritten function."""
        return self.dtype, self.declared, self.value, jax.typeof(self.array)

    def declared_as(self, value: Value) -> Cell:
        """Return the value in its declared dtype, with the flow rule's facts about it from here on."""
        return Cell(self.restored(), self.declared, self.declared, value, self.shared)


class Recipe(NamedTuple):
    """An equation with one output: the value to compute again."""

    equation: Any  # the equation
    cells: Sequence[Cell]  # its inputs
    anew: Sequence[str] = ()  # the roles of the inputs that had to be computed again for it


class CallResult(NamedTuple):
    """One result of a call. Its recipe is known once the equations of the call have run in its place."""

    result: Callable[[int], Cell]  # runs the call in place, once, and returns the result at an index
    place: int  # the index of this result


def around(cells: Iterable[Cell], arrays: Iterable[Any]) -> list[Cell]:
    """Return cells with other arrays and the same facts."""
    return [cell.around(array) for cell, array in zip(cells, arrays, strict=True)]


def held_as_declared(cells: Iterable[Cell]) -> list[Cell]:
    """Return values in their declared dtypes. A value that was low is then float32 only by its declaration."""
    return [cell.declared_as(WEAK if cell.value.state == "low" else cell.value) for cell in cells]
