"""Small trainings in Keras on TensorFlow that a policy, a loss scale or an optimizer can damage.

See ``planted_torch.py``. A whole training is one graph, made once for all seeds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import polyamp
from support.planted import BATCH, FITTING, HIDDEN, RATE, digits, rows_of

Optimizer = Callable[[polyamp.Policy], keras.optimizers.Optimizer]


class Norm(layers.Layer):
    """A layer norm written out: its variance does not fit float16 where the values are beyond 256."""

    def call(self, x: Any) -> Any:
        centred = x - ops.mean(x, -1, keepdims=True)
        return centred / ops.sqrt(ops.mean(ops.square(centred), -1, keepdims=True) + 1e-5)


class LogProbabilities(layers.Layer):
    """A log softmax written out: its epsilon is 0 in float16."""

    def call(self, x: Any) -> Any:
        return ops.log(ops.softmax(x) + 1e-12)


class RoundedAdam(keras.optimizers.Adam):
    """Adam with second moments in another format: where those underflow, nothing but its epsilon is left."""

    def __init__(self, stored_as: str) -> None:
        super().__init__(RATE / 40)
        self.stored_as = stored_as

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, learning_rate)
        second = self._velocities[self._get_variable_index(variable)]
        second.assign(ops.cast(ops.cast(second, self.stored_as), second.dtype))


def network() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(HIDDEN, name="first"),
            Norm(name="norm"),
            layers.ReLU(),
            layers.Dense(10, name="second"),
            LogProbabilities(name="probabilities"),
        ]
    )


def sgd(policy: polyamp.Policy) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(RATE, momentum=0.9)


def plain_adam(policy: polyamp.Policy) -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(RATE / 40)


def adam(policy: polyamp.Policy) -> keras.optimizers.Optimizer:
    return RoundedAdam(policy.compute)


def adam_without_epsilon(policy: polyamp.Policy) -> keras.optimizers.Optimizer:
    """Adam with an epsilon in the compute format: 0 in float16, and inputs that are always 0 divide 0 by 0."""
    epsilon = float(tf.cast(tf.cast(1e-8, policy.compute), "float32"))
    return keras.optimizers.Adam(RATE / 40, epsilon=epsilon)


def classify(policy: polyamp.Policy, seed: int, make: Optimizer = sgd) -> dict[str, float]:
    train, net, optimizer_state = _compiled(policy, make)
    rng = np.random.default_rng(seed)
    for variable in net.trainable_variables:
        is_kernel = variable.name == "kernel"
        variable.assign(is_kernel * rng.uniform(-1, 1, variable.shape) / variable.shape[0] ** 0.5)
    for variable, value in optimizer_state:
        variable.assign(value)
    return {"loss": float(train(tf.constant(rows_of(seed))))}


def classify_with_adam(policy: polyamp.Policy, seed: int) -> dict[str, float]:
    return classify(policy, seed, make=adam)


def classify_with_plain_adam(policy: polyamp.Policy, seed: int) -> dict[str, float]:
    return classify(policy, seed, make=plain_adam)


def classify_without_epsilon(policy: polyamp.Policy, seed: int) -> dict[str, float]:
    return classify(policy, seed, make=adam_without_epsilon)


@functools.cache
def _compiled(policy: polyamp.Policy, make: Optimizer) -> Any:
    """Return the function that trains and evaluates, the network, and the optimizer's variables with first values."""
    x, y, test_x, test_y = map(tf.constant, digits(FITTING))
    net = polyamp.convert(network(), policy)
    opt = polyamp.wrap_optimizer(make(policy), policy)
    opt.build(net.trainable_variables)

    def loss_of(x: Any, y: Any) -> Any:
        return -tf.reduce_mean(tf.gather(net(x), y, batch_dims=1))

    @tf.function
    def train(rows: Any) -> Any:
        for chosen in rows:
            chosen.set_shape((BATCH,))
            with tf.GradientTape() as tape:
                loss = opt.scale_loss(loss_of(tf.gather(x, chosen), tf.gather(y, chosen)))
            opt.apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)
        return loss_of(test_x, test_y)

    return train, net, [(variable, variable.numpy()) for variable in opt.variables]
