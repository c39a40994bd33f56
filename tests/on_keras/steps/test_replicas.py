"""Strategies that are refused. Those that work are tested by tests/on_tensorflow/steps/test_replicas.py."""

from __future__ import annotations

import keras
import pytest

import polyamp

if keras.backend.backend() != "tensorflow":
    pytest.skip("for Keras on TensorFlow: --keras-backend=tensorflow", allow_module_level=True)

import tensorflow as tf


def test_a_strategy_without_a_common_step_is_refused() -> None:
    named = type("ParameterServerStrategyV2", (tf.distribute.OneDeviceStrategy,), {})("CPU:0")
    with named.scope():
        weight = keras.Variable([1.0])
        opt = polyamp.wrap_optimizer(keras.optimizers.SGD(1.0), "mixed_float16")
        opt.build([weight])
    with pytest.raises(polyamp.errors.UnsupportedError, match="under a ParameterServerStrategy"):
        named.run(lambda: opt.apply([tf.constant([1.0])]))
    assert weight.numpy() == [1.0]
