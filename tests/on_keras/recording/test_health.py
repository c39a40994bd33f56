"""The counters of the loss scale in Keras' variables and files."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import ops

import polyamp
from polyamp import LossScale
from polyamp.backends.keras import LossScaledOptimizer
from polyamp.diagnosis.health import health
from polyamp.errors import InvalidTypeError

CONFIG = LossScale(init=8.0, interval=2)


def stepped(dtype: str = "float32", values: tuple[float, ...] = (1.0, np.inf, 1.0, 1.0)) -> LossScaledOptimizer:
    weight = keras.Variable([1.0, 2.0], dtype=dtype)
    opt = LossScaledOptimizer(keras.optimizers.Adam(0.01), CONFIG)
    opt.build([weight])
    for value in values:
        opt.apply_gradients([(ops.array([value, 1.0], dtype), weight)])
    return opt


def test_a_file_of_another_optimizer_is_passed_over_as_keras_does() -> None:
    opt = stepped()
    before = polyamp.save_loss_scale(opt)
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        opt.load_own_variables({"0": np.zeros(())})
    assert polyamp.save_loss_scale(opt) == before


def test_health_of_a_compiled_model() -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, dtype="mixed_float16")])
    model.compile(polyamp.wrap_optimizer(keras.optimizers.SGD(0.1), "mixed_float16", loss_scale=CONFIG), "mse")
    model.fit(np.ones((16, 4)), np.ones((16, 2)), batch_size=4, verbose=0)
    assert health(model) == health(model.optimizer)
    assert (health(model).steps, health(model).last_growth, health(model).scale) == (4, 0, 32.0)


def test_a_model_whose_optimizer_is_not_wrapped_has_no_loss_scale() -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    with pytest.raises(InvalidTypeError, match="holds no loss scale"):
        health(model)
