"""Gradients as TensorFlow returns them (dense, ``tf.IndexedSlices``, None), and the float32 masters they train.

In 16 bits, an update that is small compared to its weight is lost in rounding; in float32 it accumulates (Micikevicius
et al., "Mixed Precision Training", ICLR 2018, section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from polyamp.arrays import has_sixteen_bits, map_values
from polyamp.errors import UnsupportedError


def as_dtype(grad: Any, dtype: tf.DType) -> Any:
    """Return a gradient in its variable's dtype; with another, TensorFlow's update kernels crash the process."""
    return map_values(lambda values: tf.cast(values, dtype), grad)


class MasterWeights(tf.Module):
    """The float32 master weights of 16-bit variables, in the order of their first use; checkpoints contain them."""

    def __init__(self) -> None:
        super().__init__()
        self._masters: list[tf.Variable] = []
        self._index: dict[Any, int] = {}

    def trained(self, variables: Sequence[tf.Variable]) -> list[tf.Variable]:
        """Return the variables that the inner optimizer trains: 16-bit ones are replaced by their master weights."""
        return [self._master(variable) if has_sixteen_bits(variable) else variable for variable in variables]

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
        # The step sets its value: in a graph of a Session the variable itself has none yet.
        return tf.Variable(tf.zeros(variable.shape), trainable=False, name=name)
