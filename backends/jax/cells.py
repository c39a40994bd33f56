"""Values while a program is run again: an array in some dtype, beside what its program declared it to be."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.backends.jax.unstable import converted
from polyamp.flow import Value

WEAK = Value()
FLOAT32 = np.dtype("float32")


@functools.cache
def is_inexact(dtype: Any) -> bool:
    """Whether a dtype is floating or complex; None is no dtype.

    >>> is_inexact(np.dtype("float32")), is_inexact(np.dtype("int32")), is_inexact(None)
    (True, False, False)
    """
    return dtype is not None and jnp.issubdtype(dtype, np.inexact)


def declared_value(dtype: Any) -> Value:
    """What is known of a value by its declared dtype alone."""
    return WEAK if dtype == FLOAT32 or not is_inexact(dtype) else Value("other", np.dtype(dtype).name)


@jax.tree_util.register_pytree_node_class
class Cell:
    """One value: a pytree of one array, so that JAX's own control flow takes cells.

    Attributes:
        array: as it is now, in ``dtype``.
        dtype: what it is in now.
        declared: what the traced program has it in.
        value: what the flow rule knows of it.
        shared: whether all uses may share one cast. Those of parameters may not: the gradients of all uses would be
            added up in 16 bits.
    """

    __slots__ = ("_casts", "array", "declared", "dtype", "shared", "value")

    def __init__(self, array: Any, dtype: Any, declared: Any, value: Value, shared: bool = False) -> None:
        self.array, self.dtype, self.declared, self.value, self.shared = array, dtype, declared, value, shared
        self._casts: dict[Any, Any] | None = None

    @classmethod
    def given(cls, array: Any, declared: Any, value: Value | None = None) -> Cell:
        """A value as it was declared."""
        return cls(array, declared, declared, declared_value(declared) if value is None else value)

    def tree_flatten(self) -> tuple[tuple[Any], tuple[Any, ...]]:
        """For JAX: the array, and all else as static data."""
        return (self.array,), (self.dtype, self.declared, self.value, self.shared)

    @classmethod
    def tree_unflatten(cls, about: tuple[Any, ...], arrays: tuple[Any]) -> Cell:
        """For JAX: a cell around another array."""
        return cls(arrays[0], *about)

    @property
    def inexact(self) -> bool:
        """Whether it is floating or complex."""
        return is_inexact(self.declared)

    def within(self) -> Cell:
        """The same value for the body of a loop, a branch or a rule: casts made outside stay outside."""
        return Cell(self.array, self.dtype, self.declared, self.value, self.shared)

    def around(self, array: Any) -> Cell:
        """A cell that says the same of another array."""
        return Cell(array, self.dtype, self.declared, self.value, self.shared)

    def cast(self, dtype: Any) -> Any:
        """The array in a dtype."""
        if dtype == self.dtype or dtype is None:
            return self.array
        if not self.shared:
            return converted(self.array, dtype)
        if self._casts is None:
            self._casts = {}
        if dtype not in self._casts:
            self._casts[dtype] = converted(self.array, dtype)
        return self._casts[dtype]

    def restored(self) -> Any:
        """The array as it was declared."""
        return self.cast(self.declared)

    def stored(self, dtype: Any, value: Value) -> Cell:
        """The value held in a dtype from here on."""
        return Cell(self.cast(dtype), dtype, self.declared, value, shared=True)


def held_as_declared(cells: Iterable[Cell]) -> list[Cell]:
    """Values in their declared dtypes: one that was low is float32 only by that declaration."""
    return [Cell(cell.restored(), cell.declared, cell.declared, _unless_low(cell.value), cell.shared) for cell in cells]


def _unless_low(value: Value) -> Value:
    """What is known of a value once it is held in its declared dtype."""
    return WEAK if value.state == "low" else value
