"""Gradients as TensorFlow returns them: dense tensors, ``tf.IndexedSlices``, or None if there is no gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

SIXTEEN_BIT = (tf.float16, tf.bfloat16)


def map_values(function: Callable[[Any], Any], grad: Any) -> Any:
    """Apply ``function`` to a gradient's values: all of a dense one, the stored rows of a sparse one; None stays None.

    >>> map_values(lambda values: values * 2, tf.ones(2)).numpy()
    array([2., 2.], dtype=float32)
    """
    if grad is None:
        return None
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(function(grad.values), grad.indices, grad.dense_shape)
    return function(tf.convert_to_tensor(grad))


def all_finite(grads: Sequence[Any]) -> tf.Tensor:
    """Return whether all gradients are finite; scalar bool."""
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(values)) for values in _values(grads)] or [True])


def unscaled(grads: Sequence[Any], scale: tf.Tensor, largest_scale: float) -> list[Any]:
    """Return gradients divided by the loss scale, in float32 or wider."""
    factors = [1.0 / scale]
    if largest_scale > 2.0**126:  # the inverse can be a subnormal number, which TensorFlow flushes to zero
        first = tf.where(scale > 1.0, 0.25, 1.0)
        factors = [first, 1.0 / (scale * first)]
    for factor in factors:
        grads = multiplied(grads, factor)
    return list(grads)


def multiplied(grads: Sequence[Any], factor: tf.Tensor) -> list[Any]:
    """Return every gradient in float32 or wider, times a scalar."""

    def multiply(values: tf.Tensor) -> tf.Tensor:
        wide = tf.cast(values, tf.float32) if values.dtype in SIXTEEN_BIT else values
        return wide * tf.cast(factor, wide.dtype)

    return [map_values(multiply, grad) for grad in grads]


def as_dtype(grad: Any, dtype: tf.DType) -> Any:
    """Return a gradient in its variable's dtype: with another dtype, TensorFlow's update kernels crash the process."""
    return map_values(lambda values: tf.cast(values, dtype), grad)


def clip_factor(grads: Sequence[Any], limit: float) -> tf.Tensor:
    """Return the factor that limits the gradients' global L2 norm to ``limit``; float32 scalar, at most 1."""
    squares = [tf.reduce_sum(tf.square(tf.cast(values, tf.float32))) for values in _values(grads)]
    return limit / tf.maximum(tf.sqrt(tf.add_n(squares)), limit)


def _values(grads: Sequence[Any]) -> list[tf.Tensor]:
    found: list[tf.Tensor] = []
    for grad in grads:
        map_values(found.append, grad)
    return found
