"""The wrapped Keras optimizer, on the backend that Keras runs on: in loops, in ``fit``, and in files."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import polyamp
from polyamp import LossScale
from polyamp.backends.keras import LossScaledOptimizer
from support.harness_keras import to_numpy

pytestmark = [
    pytest.mark.backends,
    pytest.mark.filterwarnings("ignore:.*trains in float32:polyamp.PolyampWarning"),  # steps are what is tested here
]

KINDS: dict[str, Any] = {
    "sgd": lambda **options: keras.optimizers.SGD(0.1, **options),
    "adam": lambda **options: keras.optimizers.Adam(0.1, **options),
}


def wrapped(kind: str = "sgd", *, loss_scale: LossScale | None = None, **inner: Any) -> Any:
    return polyamp.wrap_optimizer(KINDS[kind](**inner), "mixed_float16", loss_scale=loss_scale)


def model_and_data() -> tuple[keras.Model, Any, Any]:
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 6)).astype("float32")
    y = (x @ rng.standard_normal((6, 2))).astype("float32")
    hidden = [layers.Dense(16, "relu"), layers.BatchNormalization()]
    return keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(2)]), x, y


# One step


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_loss_is_scaled_in_float32(dtype: str) -> None:
    scaled = wrapped(loss_scale=LossScale.fixed(2.0**20)).scale_loss(ops.array(3.0, dtype))
    assert (float(scaled), keras.backend.standardize_dtype(scaled.dtype)) == (3.0 * 2.0**20, "float32")


def test_a_step_without_gradients_is_left_to_the_inner_optimizer() -> None:
    opt = wrapped()
    opt.build([keras.Variable([1.0])])
    with pytest.raises(ValueError, match="No gradients provided"):
        opt.apply([None])


@pytest.mark.parametrize("scale", [2.0**127, 2.0**-126, 3.0])
def test_extreme_scales_unscale_exactly(scale: float) -> None:
    weight = keras.Variable([0.0])
    opt = LossScaledOptimizer(keras.optimizers.SGD(1.0), LossScale(init=scale, min=2.0**-126, max=2.0**127))
    opt.apply_gradients([(ops.array([scale]), weight)])
    assert to_numpy(weight)[0] == pytest.approx(-1.0, rel=1e-6)


def test_learning_rate_and_schedules_belong_to_the_inner_optimizer() -> None:
    opt = wrapped()
    opt.learning_rate = 0.5
    assert float(to_numpy(opt.inner_optimizer.learning_rate)) == 0.5
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0], [1.0, 0.0])
    weight, opt = keras.Variable([0.0]), LossScaledOptimizer(keras.optimizers.SGD(schedule), LossScale.fixed(1.0))
    for gradient in (np.inf, 1.0, 1.0):  # the schedule does not count the skipped step
        opt.apply_gradients([(ops.array([gradient]), weight)])
    assert to_numpy(weight).tolist() == [-1.0]


# Master weights


def test_masters_serve_moving_averages_and_constraints() -> None:
    weight = keras.Variable([1.0], dtype="float16")
    weight.constraint = keras.constraints.NonNeg()
    opt = LossScaledOptimizer(keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5), LossScale.fixed(1.0))
    for gradient in (0.5, 4.0):
        opt.apply_gradients([(ops.array([gradient], "float16"), weight)])
    assert to_numpy(weight).tolist() == [0.0]
    opt.finalize_variable_values([weight])
    assert to_numpy(weight).tolist() == [-1.5]  # Keras too averages before it constrains


# fit, compile and files


def test_fit_trains_and_compile_leaves_the_wrapped_optimizer_alone() -> None:
    model, x, y = model_and_data()
    polyamp.convert(model, "mixed_float16")
    opt = wrapped("adam", loss_scale=LossScale(init=2.0**40, max=2.0**40, interval=3))  # much too large at first
    model.compile(opt, "mse")
    assert model.optimizer is opt
    losses = model.fit(x, y, batch_size=8, epochs=6, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert 0 < polyamp.save_loss_scale(model)["skipped"] < 40
    assert all(np.isfinite(weights).all() for weights in model.get_weights())


def loaded_into_a_new_model(path: Path) -> keras.Model:
    """A model with a ``compile`` of its own is loaded without its optimizer, and gets it so."""
    model, _, _ = model_and_data()
    model.compile(wrapped("adam", loss_scale=LossScale(interval=4, hysteresis=2)), "mse")
    model.optimizer.build(model.trainable_variables)
    model.load_weights(path)
    return model


@pytest.mark.parametrize("load", [keras.saving.load_model, loaded_into_a_new_model])
def test_a_keras_file_keeps_every_field_and_the_slots(load: Any, tmp_path: Path) -> None:
    model, x, y = model_and_data()
    opt = wrapped("adam", loss_scale=LossScale(interval=4, hysteresis=2))
    model.compile(opt, "mse")
    model.train_on_batch(x, y)
    polyamp.load_loss_scale(opt, polyamp.save_loss_scale(opt) | {"skipped": 7, "good_steps": 2, "hysteresis": 1})
    model.save(tmp_path / "model.keras")
    again = load(tmp_path / "model.keras")
    assert polyamp.save_loss_scale(again.optimizer) == polyamp.save_loss_scale(opt)
    pairs = zip(again.optimizer.variables, opt.variables, strict=True)
    assert all(np.array_equal(to_numpy(one), to_numpy(other)) for one, other in pairs)
    losses = [[float(one.train_on_batch(x, y)) for _ in range(2)] for one in (model, again)]
    assert losses[0] == losses[1]


def test_a_keras_file_keeps_master_weights(tmp_path: Path) -> None:
    keras.config.set_dtype_policy("float16")
    try:
        model = keras.Sequential([keras.Input((6,)), layers.Dense(3), layers.Dense(2)])
    finally:
        keras.config.set_dtype_policy("float32")
    _, x, y = model_and_data()
    model.compile(wrapped("sgd", loss_scale=LossScale.fixed(8.0)), "mse")
    model.fit(x, y, batch_size=16, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    masters = [[to_numpy(v) for v in m.optimizer.variables if "_master" in v.name] for m in (model, again)]
    assert len(masters[0]) == 4
    assert all(np.array_equal(a, b) for a, b in zip(*masters, strict=True))
    assert any((a != a.astype("float16")).any() for a in masters[0])
