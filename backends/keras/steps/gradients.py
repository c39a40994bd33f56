"""Gradients as Keras passes them: dense tensors, sparse rows of an embedding, or None if there is no gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras import ops

from polyamp.backends.keras.dtypes import is_sixteen_bit


def map_values(function: Callable[[Any], Any], grad: Any) -> Any:
    """Apply ``function`` to a gradient's values: all of a dense one, the stored rows of a sparse one; None stays None.

    >>> map_values(lambda values: values * 2, ops.ones(2)).shape == (2,)
    True
    """
    if grad is None:
        return None
    if type(grad).__name__ == "IndexedSlices":  # by name, since TensorFlow may not be installed
        return type(grad)(function(grad.values), grad.indices, grad.dense_shape)
    return function(grad)


def all_finite(grads: Sequence[Any]) -> Any:
    """Return whether all gradients are finite; scalar bool."""
    return ops.all(ops.stack([ops.all(ops.isfinite(values)) for values in _values(grads)]))


def unscaled(grads: Sequence[Any], scale: Any, largest_scale: float) -> list[Any]:
    """Return gradients divided by the loss scale, in float32 or wider."""
    factors = [1.0 / scale]
    if largest_scale > 2.0**126:  # the inverse can be a subnormal number, which XLA and TensorFlow flush to zero
        first = ops.where(scale > 1.0, ops.full_like(scale, 0.25), ops.ones_like(scale))
        factors = [first, 1.0 / (scale * first)]

    def unscale(values: Any) -> Any:
        wide = _widened(values)
        for factor in factors:
            wide = wide * ops.cast(factor, wide.dtype)
        return wide

    return [map_values(unscale, grad) for grad in grads]


def clip_factor(grads: Sequence[Any], limit: float) -> Any:
    """Return the factor that limits the gradients' global L2 norm to ``limit``; float32 scalar, at most 1."""
    squares = [ops.sum(ops.square(ops.cast(values, "float32"))) for values in _values(grads)]
    norm = ops.sqrt(ops.sum(ops.stack(squares)))
    return limit / ops.maximum(norm, limit)


def multiplied(grads: Sequence[Any], factor: Any) -> list[Any]:
    """Return every gradient in float32 or wider, times a scalar."""

    def multiply(values: Any) -> Any:
        wide = _widened(values)
        return wide * ops.cast(factor, wide.dtype)

    return [map_values(multiply, grad) for grad in grads]


def _widened(values: Any) -> Any:
    return ops.cast(values, "float32") if is_sixteen_bit(values) else values


def _values(grads: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for grad in grads:
        map_values(found.append, grad)
    return found
