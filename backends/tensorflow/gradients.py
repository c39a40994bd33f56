"""Gradients as TensorFlow returns them (dense, ``tf.IndexedSlices``, None), and the float32 masters they train.

In 16 bits, an update that is small compared to its weight is lost in rounding; in float32 it accumulates (Micikevicius
et al., "Mixed Precision Training", ICLR 2018, section 3.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from polyamp.errors import UnsupportedError

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
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(values)) for values in values_of(grads)] or [True])


def divided(grads: Sequence[Any], divisor: tf.Tensor) -> list[Any]:
    """Return every gradient in float32 or wider, divided by a scalar."""

    def divide(values: tf.Tensor) -> tf.Tensor:
        wide = tf.cast(values, tf.float32) if values.dtype in SIXTEEN_BIT else values
        return wide / tf.cast(divisor, wide.dtype)

    return [map_values(divide, grad) for grad in grads]


def as_dtype(grad: Any, dtype: tf.DType) -> Any:
    """Return a gradient in its variable's dtype: with another dtype, TensorFlow's update kernels crash the process."""
    return map_values(lambda values: tf.cast(values, dtype), grad)


def excess(grads: Sequence[Any], limit: float) -> tf.Tensor:
    """Return by how much the gradients' global L2 norm exceeds ``limit``, as a factor of at least 1; float32."""
    squares = [tf.reduce_sum(tf.square(tf.cast(values, tf.float32))) for values in values_of(grads)]
    return tf.maximum(tf.sqrt(tf.add_n(squares)), limit) / limit


def values_of(grads: Sequence[Any]) -> list[tf.Tensor]:
    """Return the values of the gradients that are not None."""
    found: list[tf.Tensor] = []
    for grad in grads:
        map_values(found.append, grad)
    return found


class MasterWeights(tf.Module):
    """The float32 master weights of all 16-bit variables asked for so far, in that order; checkpoints contain them."""

    def __init__(self) -> None:
        super().__init__()
        self._masters: list[tf.Variable] = []
        self._index: dict[Any, int] = {}

    def trained(self, variables: Sequence[tf.Variable]) -> list[tf.Variable]:
        """Return the variables that the inner optimizer trains: 16-bit ones are replaced by their master weights."""
        return [self._master(variable) if variable.dtype in SIXTEEN_BIT else variable for variable in variables]

    @staticmethod
    def follow(variables: Sequence[tf.Variable], trained: Sequence[tf.Variable]) -> list[Any]:
        """Copy a value assigned to a model's variable since the last rounding into its master weight."""
        return [_follow(variable, master) for variable, master in _pairs(variables, trained)]

    @staticmethod
    def round_into(variables: Sequence[tf.Variable], trained: Sequence[tf.Variable]) -> list[Any]:
        """Round the master weights into the model's variables; the result is as in `follow`."""
        pairs = _pairs(variables, trained)
        return [one.assign(tf.cast(master, one.dtype), read_value=False) for one, master in pairs]

    def _master(self, variable: tf.Variable) -> tf.Variable:
        if tf.distribute.has_strategy():
            raise UnsupportedError(
                "master weights do not work with replicas",
                where="a tf.distribute strategy",
                found=f"{variable.name} of {variable.dtype.name}",
                allowed="float32 variables",
                fix="store variables in float32, and cast them where they are used: policy.cast_to_compute(variables)",
            )
        key = variable.ref()
        if key not in self._index:
            self._index[key] = len(self._masters)
            self._masters.append(_new_master(variable))
        return self._masters[self._index[key]]


def _new_master(variable: tf.Variable) -> tf.Variable:
    name = f"{variable.name.partition(':')[0]}_master"
    with tf.init_scope():  # outside any function that is being traced, as for the slots of optimizers
        # `follow` sets its value: in a graph of a Session the variable itself has none yet.
        return tf.Variable(tf.zeros(variable.shape), trainable=False, name=name)


def _follow(variable: tf.Variable, master: tf.Variable) -> Any:
    value, exact = tf.convert_to_tensor(variable), tf.convert_to_tensor(master)
    is_unchanged = tf.equal(tf.cast(exact, value.dtype), value)  # in a graph of a Session, `==` compares the objects
    return master.assign(tf.where(is_unchanged, exact, tf.cast(value, tf.float32)), read_value=False)


def _pairs(variables: Sequence[Any], trained: Sequence[Any]) -> list[tuple[Any, Any]]:
    return [(one, other) for one, other in zip(variables, trained, strict=True) if one is not other]
