"""Steps on several logical devices. Their number is fixed when TensorFlow starts, so each strategy has a process.

Tests of the Keras optimizer and of `polyamp.rewrite` share them: to start one takes as long as many tests.
"""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp.backends.tensorflow import LossScaler
from support.own_process import run_tests, run_together, tensorflow_workers

HERE = Path(__file__).parent
STEPS = (HERE / "replicas.py", HERE.parent / "on_keras" / "replicas.py")
REWRITTEN = HERE / "graphs" / "rewrite_devices.py"
SUITES = "tensorflow,keras"
MATTER = "(everywhere and function) or norm or saved or outside or several_processes or unlike_devices"
"""What two processes test; eager steps are slow there."""


@pytest.mark.slow
def test_over_one_worker() -> None:
    run_tests(STEPS[0], SUITES, "-k", "everywhere and function", POLYAMP_TEST_STRATEGY="one worker")


@pytest.mark.slow
def test_over_replicas_that_do_not_merge() -> None:
    run_tests(STEPS[0], SUITES, POLYAMP_TEST_STRATEGY="without merging")


@pytest.mark.slow
def test_over_mirrored_replicas() -> None:
    run_tests(STEPS[0], SUITES, STEPS[1], REWRITTEN, POLYAMP_TEST_STRATEGY="mirrored")


@pytest.mark.slow
def test_over_two_processes() -> None:
    each = [{"POLYAMP_TEST_STRATEGY": "two workers"} | worker for worker in tensorflow_workers(2)]
    run_together(STEPS[0], SUITES, each, STEPS[1], "-x", "--tb=short", "-k", MATTER)


SGD = tf.compat.v1.train.GradientDescentOptimizer


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(
    "strategy", [lambda: tf.distribute.OneDeviceStrategy("CPU:0"), lambda: tf.distribute.MirroredStrategy(["CPU:0"])]
)
def test_over_one_replica(strategy: Any, is_compiled: bool) -> None:
    over = strategy()
    with over.scope():
        weight, other = tf.Variable([1.0, 2.0]), keras.Variable([1.0, 2.0])
        scaler = LossScaler(polyamp.LossScale(init=8.0))
        opt = polyamp.wrap_optimizer(keras.optimizers.SGD(1.0), "mixed_float16", loss_scale=polyamp.LossScale(init=8.0))
        opt.build([other])

    def step(grad: tf.Tensor) -> None:
        over.run(lambda: (scaler.step(SGD(1.0), [(grad, weight)]), opt.apply_gradients([(grad, other)]))[1])

    run = tf.function(step, autograph=False) if is_compiled else step
    for grad, expected in (([np.inf, 1.0], [1.0, 2.0]), ([4.0, 0.0], [0.0, 2.0])):
        run(tf.constant(grad))
        assert (weight.numpy().tolist(), other.numpy().tolist()) == (expected, expected)
        assert (scaler.loss_scale, opt.loss_scale) == (4.0, 4.0)


@pytest.mark.parametrize("name", ["ParameterServerStrategyV2", "CentralStorageStrategy", "TPUStrategy"])
def test_strategies_without_a_common_step_are_refused_by_name(name: str) -> None:
    """To make one takes a cluster or a TPU."""
    named = type(name, (tf.distribute.OneDeviceStrategy,), {})("CPU:0")
    with named.scope():
        weight, scaler = tf.Variable([1.0]), LossScaler(polyamp.LossScale(init=8.0))
        plain = LossScaler(polyamp.LossScale.none())
    with pytest.raises(polyamp.errors.UnsupportedError, match=f"cannot decide together[\\s\\S]*{name}"):
        named.run(lambda: scaler.step(SGD(1.0), [(tf.constant([8.0]), weight)]))
    assert (weight.numpy(), scaler.loss_scale) == ([1.0], 8.0)
    named.run(lambda: plain.step(SGD(1.0), [(tf.constant([1.0]), weight)]))
    assert weight.numpy() == [0.0]
