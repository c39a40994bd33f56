"""Gradients as TensorFlow returns them (dense, ``tf.IndexedSlices``, None), and the float32 masters they train.

In 16 bits, an update that is small compared to its weight is lost in rounding; in float32 it accumulates (Micikevicius
et al., "Mixed Precision Training", ICLR 2018, section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from polyamp.arrays import followed, has_sixteen_bits, map_values, values_of, with_masters
from polyamp.errors import UnsupportedError


def all_finite(grads: Sequence[Any]) -> tf.Tensor:
    """Return whether all gradients are finite; scalar bool."""
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(values)) for values in values_of(grads)] or [True])


def as_dtype(grad: Any, dtype: tf.DType) -> Any:
    """Return a gradient in its variable's dtype: with another dtype, TensorFlow's update kernels crash the process."""
    return map_values(lambda values: tf.cast(values, dtype), grad)


def excess(grads: Sequence[Any], limit: float) -> tf.Tensor:
    """Return by how much the gradients' global L2 norm exceeds ``limit``, as a factor of at least 1; float32."""
    squares = [tf.reduce_sum(tf.square(tf.cast(values, tf.float32))) for values in values_of(grads)]
    return tf.maximum(tf.sqrt(tf.add_n(squares)), limit) / limit


class MasterWeights(tf.Module):
    """The float32 master weights of all 16-bit variables asked for so far, in that order; checkpoints contain them."""

    def __init__(self) -> None:
        super().__init__()
        self._masters: list[tf.Variable] = []
        self._index: dict[Any, int] = {}

    def trained(self, variables: Sequence[tf.Variable]) -> list[tf.Variable]:
        """Return the variables that the inner optimizer trains: 16-bit ones are replaced by their master weights."""
        return [self._master(variable) if has_sixteen_bits(variable) else variable for variable in variables]

    @staticmethod
    def follow(variables: Sequence[tf.Variable], trained: Sequence[tf.Variable]) -> list[Any]:
        """Copy a value assigned to a model's variable since the last rounding into its master weight."""
        return [
            master.assign(followed(tf, tf.convert_to_tensor(one), tf.convert_to_tensor(master)), read_value=False)
            for one, master in with_masters(variables, trained)
        ]

    @staticmethod
    def round_into(variables: Sequence[tf.Variable], trained: Sequence[tf.Variable]) -> list[Any]:
        """Round the master weights into the model's variables; the result is as in `follow`."""
        pairs = with_masters(variables, trained)
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
