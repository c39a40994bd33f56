"""Several logical devices: their number is fixed when TensorFlow starts, so these tests run in other processes."""

from __future__ import annotations

from pathlib import Path

import keras
import pytest

import polyamp
from support.own_process import run_tests, run_together, tensorflow_workers

if keras.backend.backend() != "tensorflow":
    pytest.skip("for Keras on TensorFlow: --keras-backend=tensorflow", allow_module_level=True)

import tensorflow as tf

MATTER = "(anywhere and True and apply) or applied or norm or outside or several_processes"
"""What two processes test; eager steps are slow there."""


@pytest.mark.parametrize(
    "strategy", ["mirrored", "without merging", "mirrored, one replica", "one worker", "one device"]
)
def test_over_replicas(strategy: str) -> None:
    run_tests(Path(__file__).with_name("replicas.py"), "keras", POLYAMP_TEST_STRATEGY=strategy)


def test_over_two_processes() -> None:
    each = [{"POLYAMP_TEST_STRATEGY": "two workers"} | worker for worker in tensorflow_workers(2)]
    run_together(Path(__file__).with_name("replicas.py"), "keras", each, "-x", "--tb=short", "-k", MATTER)


def test_a_strategy_without_a_common_step_is_refused() -> None:
    named = type("ParameterServerStrategyV2", (tf.distribute.OneDeviceStrategy,), {})("CPU:0")
    with named.scope():
        weight = keras.Variable([1.0])
        opt = polyamp.wrap_optimizer(keras.optimizers.SGD(1.0), "mixed_float16")
        opt.build([weight])
    with pytest.raises(polyamp.UnsupportedError, match="under a ParameterServerStrategy"):
        named.run(lambda: opt.apply([tf.constant([1.0])]))
    assert weight.numpy() == [1.0]
