"""The wrapped Keras optimizer's settings: as polyamp has them and as Keras has them, in files, and what is refused."""

import json
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops
from keras.optimizers import SGD

import polyamp
from polyamp import LossScale
from polyamp.backends.keras import LossScaledOptimizer
from support.harness_keras import to_numpy


def test_the_class_itself_takes_a_factor_away_as_that_of_keras_does_and_says_so() -> None:
    plain = SGD(1.0, loss_scale_factor=8.0)
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
    opt = LossScaledOptimizer(SGD(), *arguments, **options)
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
    plain = SGD()
    with pytest.raises(polyamp.PolyampError, match=match):
        LossScaledOptimizer(plain, *arguments, **options)


def built_on_16_bits() -> None:
    variable, plain = keras.Variable([1.0], dtype="float16"), SGD()
    plain.build([variable])
    LossScaledOptimizer(plain).build([variable])


@pytest.mark.parametrize(
    ("misuse", "match"),
    [
        (lambda: polyamp.wrap_optimizer(keras.optimizers.LossScaleOptimizer(SGD())), "wrapped already"),
        (lambda: polyamp.wrap_optimizer(SGD(loss_scale_factor=8.0), "mixed_float16"), "two loss scales"),
        (
            lambda: polyamp.wrap_optimizer(SGD(gradient_accumulation_steps=2), max_grad_norm=1.0),
            r"global_clipnorm=1\.0",
        ),
        (lambda: LossScaledOptimizer(SGD()).apply([ops.ones(2)]), "does not know its variables"),
        (built_on_16_bits, "built on 16-bit variables"),
    ],
)
def test_misuse_is_refused(misuse: Any, match: str) -> None:
    with pytest.raises(polyamp.PolyampError, match=match):
        misuse()


@pytest.mark.parametrize("loss", [3, "loss", None, np.int32(2)])
def test_a_loss_that_is_not_floating_is_refused(loss: Any) -> None:
    with pytest.raises(polyamp.errors.InvalidTypeError, match="a floating-point tensor"):
        polyamp.wrap_optimizer(SGD(), "mixed_float16").scale_loss(loss)


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
