"""Steps on several logical devices. Their number is fixed when TensorFlow starts, so each strategy has a process.

Tests of the Keras optimizer and of `polyamp.rewrite` share them: to start one takes as long as many tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tensorflow as tf

import polyamp
from polyamp.backends.tensorflow import LossScaler
from support.own_process import run_tests, run_together, tensorflow_workers

HERE = Path(__file__).parent
STEPS = (HERE / "replicas.py", HERE.parent / "on_keras" / "replicas.py")
REWRITTEN = HERE / "graphs" / "rewrite_devices.py"
SUITES = "tensorflow,keras"
MATTER = "(anywhere or applied) and (True or function) or norm or saved or outside or several_processes"
"""What two processes test; eager steps are slow there."""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["mirrored, one replica", "one worker", "one device"])
def test_over_one_replica(strategy: str) -> None:
    run_tests(STEPS[0], SUITES, "-k", "applied or first_replica", POLYAMP_TEST_STRATEGY=strategy)


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


@pytest.mark.parametrize("name", ["ParameterServerStrategyV2", "CentralStorageStrategy", "TPUStrategy"])
def test_strategies_without_a_common_step_are_refused_by_name(name: str) -> None:
    """To make one takes a cluster or a TPU."""
    named = type(name, (tf.distribute.OneDeviceStrategy,), {})("CPU:0")
    with named.scope():
        weight, scaler = tf.Variable([1.0]), LossScaler(polyamp.LossScale(init=8.0))
        plain = LossScaler(polyamp.LossScale.none())
    sgd = tf.compat.v1.train.GradientDescentOptimizer(1.0)
    with pytest.raises(polyamp.errors.UnsupportedError, match=f"cannot decide together[\\s\\S]*{name}"):
        named.run(lambda: scaler.step(sgd, [(tf.constant([8.0]), weight)]))
    assert (weight.numpy(), scaler.loss_scale) == ([1.0], 8.0)
    named.run(lambda: plain.step(sgd, [(tf.constant([1.0]), weight)]))
    assert weight.numpy() == [0.0]
