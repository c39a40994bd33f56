"""A control that rounds updates reaches graphs of a ``Session``, compiled functions, and optimizers without a class."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

import polyamp
from polyamp.backends.tensorflow import LossScaler
from polyamp.controls import broken, for_policy

v1 = tf.compat.v1
UNSCALED, ROUNDED = for_policy("mixed_float16")
SMALL, LARGE = -(2.0**-12), -(2.0**-10)
OPTIMIZERS = {
    "v1": lambda: v1.train.GradientDescentOptimizer(1.0),
    "keras": lambda: keras.optimizers.SGD(1.0),
}


@pytest.mark.parametrize("mode", ["eager", "function", "xla"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_scaler_rounds_the_updates_of_any_optimizer(kind: str, mode: str) -> None:
    weight, optimizer = tf.Variable([1.0, 1.0]), OPTIMIZERS[kind]()
    if kind == "keras":
        optimizer.build([weight])
    with broken(ROUNDED) as tally:
        scaler = LossScaler("mixed_float16")

    def step() -> None:
        with tf.GradientTape() as tape:
            scaled = scaler.scale(tf.reduce_sum(weight * [SMALL, LARGE]))
        scaler.step(optimizer, [(tape.gradient(scaled, weight), weight)])

    run: Any = step if mode == "eager" else tf.function(step, jit_compile=mode == "xla")
    for steps in (1, 2):
        run()
        assert weight.numpy().tolist() == [1.0, 1.0 - steps * LARGE]
    assert tally.reached == 1


def test_a_rewritten_step_is_rounded_too() -> None:
    weight = tf.Variable([[1.0, 1.0]])
    with broken(ROUNDED):
        opt = polyamp.wrap_optimizer(OPTIMIZERS["keras"](), "mixed_float16", loss_scale=256.0)

    @polyamp.rewrite(policy="mixed_float16")
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = opt.scale_loss(tf.reduce_sum(tf.matmul(weight, [[SMALL, 0.0], [0.0, LARGE]])))
        opt.apply_gradients([(tape.gradient(loss, weight), weight)])
        return loss

    for steps in (1, 2):
        step()
        assert weight.numpy().tolist() == [[1.0, 1.0 - steps * LARGE]]


def test_replicas_are_not_reached() -> None:
    with tf.distribute.OneDeviceStrategy("cpu").scope(), broken(ROUNDED) as tally:
        LossScaler("mixed_float16")
    assert tally.reached == 0
