"""AutoGraph converts the user's functions, and no function of polyamp: that would take seconds for a step."""

import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

import polyamp

X = tf.constant([[1.0, 2.0], [3.0, 4.0]])
F16 = polyamp.policy("mixed_float16")


def converted() -> set[str]:
    """Return the functions on the stack that AutoGraph has converted."""
    return {frame.name for frame in traceback.extract_stack() if frame.name.startswith("tf__")}


IMPORT = """
from tensorflow.python.autograph.core import config
before = config.CONVERSION_RULES
import polyamp.backends.tensorflow
assert config.CONVERSION_RULES is before
polyamp.backends.tensorflow.LossScaler("mixed_float16")
assert config.CONVERSION_RULES[1:] == before
"""


def test_importing_the_adapter_does_not_change_autograph() -> None:
    subprocess.run([sys.executable, "-c", IMPORT], check=True)


class Noting(keras.optimizers.SGD):
    """Notes which functions around its update are converted."""

    def __init__(self) -> None:
        super().__init__(0.1)
        self.seen: set[str] = set()

    def update_step(self, *given: Any) -> None:
        self.seen |= converted()
        super().update_step(*given)


class NotingV1(tf.compat.v1.train.GradientDescentOptimizer):
    """The same of TensorFlow 1."""

    def __init__(self) -> None:
        super().__init__(0.1)
        self.seen: set[str] = set()

    def apply_gradients(self, *given: Any, **options: Any) -> Any:
        self.seen |= converted()
        return super().apply_gradients(*given, **options)


@pytest.mark.parametrize("inner", [Noting, NotingV1])
def test_a_wrapped_optimizer_is_not_converted(inner: Callable[[], Any]) -> None:
    weight, noting = tf.Variable(X), inner()
    opt = polyamp.wrap_optimizer(noting, F16)

    @tf.function
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = opt.scale_loss(tf.reduce_sum(x @ weight))
        opt.apply_gradients([(tape.gradient(loss, weight), weight)])

    step(X)
    assert noting.seen == {"tf__step"}


def positive(x: tf.Tensor) -> tf.Tensor:
    if tf.reduce_sum(x) > 0:  # a tensor: only converted code can decide
        return x @ x
    return -x


def test_a_function_that_polyamp_calls_is_converted() -> None:
    function = polyamp.rewrite(positive, policy=F16, backend="tensorflow")
    outer = tf.function(lambda x: function(x))
    assert [outer(X).numpy().tolist(), outer(-X).numpy().tolist()] == [(X @ X).numpy().tolist(), X.numpy().tolist()]


def test_losses_that_an_optimizer_computes_are_converted() -> None:
    weight, opt = tf.Variable(1.0), polyamp.wrap_optimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5), F16)

    @tf.function
    def step() -> None:
        opt.apply_gradients(opt.compute_gradients(lambda: positive(weight[None, None])[0, 0], [weight]))

    step()
    assert float(weight) == 0.0
