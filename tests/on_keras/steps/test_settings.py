"""The wrapped Keras optimizer's settings: as polyamp has them and as Keras has them, in files, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import polyamp
from polyamp import LossScale
from polyamp.backends.keras import LossScaledOptimizer
from support.harness_keras import to_numpy

# Keras 3.15 calls __array__ as NumPy 1 did.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.mark.parametrize("make", [keras.optimizers.LossScaleOptimizer, LossScaledOptimizer])
def test_a_wrapped_optimizer_is_refused(make: Any) -> None:
    with pytest.raises(polyamp.errors.UsageError, match="wrapped already"):
        polyamp.wrap_optimizer(make(keras.optimizers.SGD()), "mixed_float16")


def test_two_loss_scales_are_refused_and_nothing_is_changed() -> None:
    plain = keras.optimizers.SGD(loss_scale_factor=8.0)
    with pytest.raises(polyamp.errors.InvalidValueError, match="two loss scales"):
        polyamp.wrap_optimizer(plain, "mixed_float16")
    assert plain.loss_scale_factor == 8.0


def test_the_class_itself_takes_a_factor_away_as_that_of_keras_does_and_says_so() -> None:
    plain = keras.optimizers.SGD(1.0, loss_scale_factor=8.0)
    with pytest.warns(polyamp.PolyampWarning, match="is ignored"):
        opt = LossScaledOptimizer(plain, 4.0)
    weight = keras.Variable([0.0])
    opt.apply([ops.array([4.0])], [weight])
    assert to_numpy(weight).tolist() == [-1.0]


@pytest.mark.parametrize(
    ("arguments", "options", "expected"),
    [
        ((), {}, LossScale()),
        ((400.0,), {}, LossScale(init=400.0)),
        ((), {"initial_scale": 400}, LossScale(init=400.0)),
        ((2.0, 2), {}, LossScale(init=2.0, interval=2)),
        ((), {"dynamic_growth_steps": 7}, LossScale(interval=7)),
        ((2.0**40,), {}, LossScale(init=2.0**40, max=2.0**40)),
        ((2.0**-20,), {}, LossScale(init=2.0**-20, min=2.0**-20)),
        ((LossScale(init=4.0),), {"initial_scale": 4.0, "dynamic_growth_steps": 2000}, LossScale(init=4.0)),
    ],
)
def test_settings_can_be_given_as_to_the_class_of_keras(
    arguments: tuple[Any, ...], options: dict[str, Any], expected: LossScale
) -> None:
    opt = LossScaledOptimizer(keras.optimizers.SGD(), *arguments, **options)
    assert opt.scaler.settings == expected
    assert (opt.initial_scale, opt.dynamic_growth_steps) == (expected.init, expected.interval)
    assert LossScaledOptimizer.from_config(opt.get_config()).scaler.settings == expected


@pytest.mark.parametrize(
    ("arguments", "options", "match"),
    [
        ((LossScale(init=4.0),), {"initial_scale": 8.0}, "initial_scale"),
        ((4.0,), {"initial_scale": 8.0}, "initial_scale"),
        ((LossScale(), 100), {}, "dynamic_growth_steps"),
        ((None, 1.0), {}, "interval"),
        ((float("nan"),), {}, "init"),
        ((-1.0,), {}, "init"),
        (("large",), {}, "init"),
        ((), {"clipnorm": 1.0}, "on the `inner_optimizer`"),
        ((), {"foo": 1}, "arguments: `foo`"),
        ((), {"dynamic": False}, r"LossScale\.fixed"),
    ],
)
def test_settings_that_contradict_or_make_no_sense_are_refused(
    arguments: tuple[Any, ...], options: dict[str, Any], match: str
) -> None:
    plain = keras.optimizers.SGD()
    with pytest.raises(polyamp.PolyampError, match=match):
        LossScaledOptimizer(plain, *arguments, **options)


def test_clipping_before_accumulation_is_refused() -> None:
    with pytest.raises(polyamp.errors.InvalidValueError, match=r"global_clipnorm=1\.0"):
        polyamp.wrap_optimizer(keras.optimizers.SGD(gradient_accumulation_steps=2), max_grad_norm=1.0)


@pytest.mark.parametrize("loss", [3, "loss", None, np.int32(2)])
def test_a_loss_that_is_not_floating_is_refused(loss: Any) -> None:
    with pytest.raises(polyamp.errors.InvalidTypeError, match="a floating-point tensor"):
        polyamp.wrap_optimizer(keras.optimizers.SGD(), "mixed_float16").scale_loss(loss)


def test_a_step_on_unknown_variables_is_refused() -> None:
    with pytest.raises(polyamp.errors.UsageError, match="does not know its variables"):
        polyamp.wrap_optimizer(keras.optimizers.SGD(), "mixed_float16").apply([ops.ones(2)])


def test_an_optimizer_built_on_16_bits_is_refused() -> None:
    variable, plain = keras.Variable([1.0], dtype="float16"), keras.optimizers.SGD()
    plain.build([variable])
    with pytest.raises(polyamp.errors.UsageError, match="built on 16-bit variables"):
        LossScaledOptimizer(plain).build([variable])


def test_settings_go_through_json_and_back() -> None:
    config = LossScale(init=8.0, interval=7, hysteresis=2, min=0.5)
    opt = LossScaledOptimizer(keras.optimizers.Adam(0.25), config, max_grad_norm=3.0, master_weights=False, name="mine")
    saved = json.loads(json.dumps(keras.saving.serialize_keras_object(opt)))
    again = keras.saving.deserialize_keras_object(saved)
    assert type(again) is LossScaledOptimizer
    assert (again.scaler.settings, again.max_grad_norm) == (config, 3.0)
    assert (again.master_weights, again.name) == (False, "mine")
    assert isinstance(again.inner_optimizer, keras.optimizers.Adam)
    assert float(to_numpy(again.learning_rate)) == 0.25
    assert again.get_config() == opt.get_config()
