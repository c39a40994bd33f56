"""Values while a program is run again: an array in some dtype, beside what its program declared it to be."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.backends.jax.unstable import converted
from polyamp.flow import WEAK, Value

if TYPE_CHECKING:
    from polyamp.backends.jax.graphs.recipes import Again, Recipe

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
        constant: whether it is computed of constants alone.
        same: what is equal for cells that hold the same numbers in the same order.
        recipe: how it is computed anew in float32; None where that is not known. It does not go into the bodies of
            loops, branches and rules.
    """

    __slots__ = ("_casts", "array", "constant", "declared", "dtype", "recipe", "same", "shared", "value")

    def __init__(
        self,
        array: Any,
        dtype: Any,
        declared: Any,
        value: Value,
        shared: bool = False,
        constant: bool = False,
        same: Any = None,
    ) -> None:
        self.array, self.dtype, self.declared, self.value, self.shared = array, dtype, declared, value, shared
        self.constant, self.same = constant, object() if same is None else same
        self.recipe: Recipe | Again | None = None
        self._casts: dict[Any, Any] | None = None

    @classmethod
    def given(cls, array: Any, declared: Any, value: Value | None = None, constant: bool = False) -> Cell:
        """A value as it was declared; ``value`` is what is known of it if that is float32."""
        known = declared_value(declared) if value is None or declared != FLOAT32 else value
        return cls(array, declared, declared, known, constant=constant)

    def tree_flatten(self) -> tuple[tuple[Any], tuple[Any, ...]]:
        """For JAX: the array, and all else that can be compared as static data."""
        return (self.array,), (self.dtype, self.declared, self.value, self.shared, self.constant)

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
        return self.around(self.array)

    def around(self, array: Any) -> Cell:
        """A cell that says the same of another array."""
        return Cell(array, self.dtype, self.declared, self.value, self.shared, self.constant, self.same)

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

    def low(self, dtype: Any, value: Value) -> Cell:
        """What stands for such a value in 16 bits, made by what made another one."""
        return Cell(self.array, dtype, self.declared, Value("low", value.maker), shared=True)

    @property
    def format(self) -> Any:
        """What tells its format from another's, in arguments of a function."""
        return self.dtype, self.declared, self.value, self.constant, jax.typeof(self.array)

    def as_given(self, value: Value) -> Cell:
        """The value in its declared dtype, and what is known of it from there on."""
        return Cell(self.restored(), self.declared, self.declared, value, self.shared, self.constant, self.same)


def held_as_declared(cells: Iterable[Cell]) -> list[Cell]:
    """Values in their declared dtypes: one that was low is float32 only by that declaration."""
    return [cell.as_given(WEAK if cell.value.state == "low" else cell.value) for cell in cells]
