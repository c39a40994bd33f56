"""What a step does to gradients and master weights, written once for the frameworks that spell these functions alike.

They take the framework's namespace ``xp``: ``cast``, ``equal``, ``is_tensor`` and ``where`` are used. They work eagerly
and in graphs that are being built. A sparse gradient is an object with ``values``, ``indices`` and ``dense_shape``;
only its stored rows are computed with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def map_values(function: Callable[[Any], Any], grad: Any) -> Any:
    """Apply a function to a gradient's values: all of a dense one, the stored rows of a sparse one; None stays None."""
    if hasattr(grad, "dense_shape"):
        return type(grad)(values=function(grad.values), indices=grad.indices, dense_shape=grad.dense_shape)
    return None if grad is None else function(grad)


def values_of(grads: Sequence[Any]) -> list[Any]:
    """Return the values of the gradients that are not None."""
    return [grad.values if hasattr(grad, "dense_shape") else grad for grad in grads if grad is not None]


def has_sixteen_bits(value: Any) -> bool:
    """Return whether a tensor or variable is stored in a 16-bit floating-point format."""
    return "float16" in str(value.dtype)  # bfloat16 too


def widened(xp: Any, value: Any) -> Any:
    """Return a tensor in float32 if it has 16 bits."""
    return xp.cast(value, "float32") if has_sixteen_bits(value) else value


def divided(xp: Any, grads: Sequence[Any], divisor: Any) -> list[Any]:
    """Return every gradient in float32 or wider, divided by a scalar."""

    def divide(values: Any) -> Any:
        wide = widened(xp, values)
        return wide / xp.cast(divisor, wide.dtype)

    return [map_values(divide, grad) for grad in grads]


def with_masters(variables: Sequence[Any], trained: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return the variables that have master weights, each with the master weight that is trained in its place."""
    return [(one, other) for one, other in zip(variables, trained, strict=True) if one is not other]


def followed(xp: Any, value: Any, master: Any) -> Any:
    """Return a master weight, with what was assigned to the model's variable since it was rounded into that."""
    return xp.where(xp.equal(xp.cast(master, value.dtype), value), master, xp.cast(value, "float32"))


def select(xp: Any, counter: str, condition: Any, if_true: Any, if_false: Any) -> Any:
    """Select values; a Python number gets the type of the tensor next to it, or that of a counter."""
    dtype = next((value.dtype for value in (if_true, if_false) if xp.is_tensor(value)), counter)
    return xp.where(condition, xp.cast(if_true, dtype), xp.cast(if_false, dtype))
