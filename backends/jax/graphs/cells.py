"""Values, called cells, while a program runs again: each an array in some dtype, with its declared dtype.

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
        """Return the cell of an array that is in its declared dtype; ``value``: the facts, used for float32."""
        known = declared_value(declared) if value is None or declared != FLOAT32 else value
        return cls(array, declared, declared, known)

    def tree_flatten(self) -> tuple[tuple[Any], tuple[Any, ...]]:
        """Return the array; and, as static data to compare, all other fields but ``recipe`` and ``casts``."""
        return (self.array,), (self.dtype, self.declared, self.value, self.shared)

    @classmethod
    def tree_unflatten(cls, about: tuple[Any, ...], arrays: tuple[Any]) -> Cell:
        """Return the cell of these parts."""
        return cls(arrays[0], *about)

    @property
    def inexact(self) -> bool:
        """Whether the value is floating-point or complex."""
        return is_inexact(self.declared)

    def within(self) -> Cell:
        """Return the cell without casts and without how it was computed, for the body of a loop, branch or rule."""
        return self.around(self.array)

    def around(self, array: Any) -> Cell:
        """Return a cell with another array, and the dtypes and facts of this one."""
        return Cell(array, self.dtype, self.declared, self.value, self.shared)

    def cast(self, dtype: Any) -> Any:
        """Return the array in a dtype; unchanged if the dtype is None."""
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
        """Return a cell that describes the array as low, in ``dtype``, and made by the maker of ``value``."""
        return Cell(self.array, dtype, self.declared, Value("low", value.maker), shared=True)

    @property
    def format(self) -> Any:
        """A key: arguments whose keys are equal can share a rewritten function."""
        return self.dtype, self.declared, self.value, jax.typeof(self.array)

    def declared_as(self, value: Value) -> Cell:
        """Return a cell of the array in its declared dtype, with ``value`` as the flow rule's facts."""
        return Cell(self.restored(), self.declared, self.declared, value, self.shared)


class Recipe(NamedTuple):
    """How to compute a value again: by the equation whose only output it is."""

    equation: Any  # the equation
    cells: Sequence[Cell]  # its inputs
    anew: Sequence[str] = ()  # the roles of the inputs that had to be computed again for it


class CallResult(NamedTuple):
    """How to compute a result of a call again: run the equations of the call, once for all of its results."""

    result: Callable[[int], Cell]  # runs the call in place, once, and returns the result at an index
    place: int  # the index of this result


def around(cells: Iterable[Cell], arrays: Iterable[Any]) -> list[Cell]:
    """Return cells with other arrays, and the same dtypes and facts."""
    return [cell.around(array) for cell, array in zip(cells, arrays, strict=True)]


def held_as_declared(cells: Iterable[Cell]) -> list[Cell]:
    """Return cells in their declared dtypes; low ones become weak, which is float32 only by declaration."""
    return [cell.declared_as(WEAK if cell.value.state == "low" else cell.value) for cell in cells]
