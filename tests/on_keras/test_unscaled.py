"""Losses that nobody scaled, in eager code; what is not a gradient; and two methods that only Keras 2 had."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import polyamp
from polyamp import LossScale
from polyamp.backends.keras import LossScaledOptimizer
from support.harness_keras import to_numpy

pytestmark = pytest.mark.backends


def optimizer(**options: Any) -> tuple[keras.Variable, LossScaledOptimizer]:
    weight, opt = keras.Variable([0.0]), LossScaledOptimizer(keras.optimizers.SGD(1.0), LossScale(init=8.0), **options)
    opt.build([weight])
    return weight, opt


@pytest.mark.parametrize("name", ["get_scaled_loss", "get_unscaled_gradients"])
def test_a_method_of_keras_2_is_refused_with_what_to_write(name: str) -> None:
    with pytest.raises(polyamp.errors.UnsupportedMethodError, match=r"scale_loss(?s:.*)docs/migrate/keras\.md"):
        getattr(optimizer()[1], name)


BAD: list[Any] = [3, None, [[1.0]], [{}], [2.0], ops.ones((1,)), [ops.ones((1,), "int32")]]


@pytest.mark.parametrize("grads", BAD, ids=range(len(BAD)))
def test_what_are_no_gradients_is_refused(grads: Any) -> None:
    weight, opt = optimizer()
    for use in (opt.apply, opt.apply_gradients):
        with pytest.raises(polyamp.errors.InvalidTypeError, match="a list of gradients"):
            use(grads)
    with pytest.raises(polyamp.errors.InvalidValueError, match="one gradient for each variable"):
        opt.apply([ops.ones((1,))] * 2)
    assert (to_numpy(weight).tolist(), opt.loss_scale) == ([0.0], 8.0)


# Losses that nobody scaled, in eager code.


def trained_by_fit() -> tuple[keras.Variable, LossScaledOptimizer]:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(LossScaledOptimizer(keras.optimizers.SGD(1.0), LossScale(init=8.0, interval=1)), "mse")
    model.fit(np.ones((4, 1)), np.ones((4, 1)), batch_size=2, verbose=0)
    return model.trainable_variables[0], model.optimizer


def unscaled_step(opt: LossScaledOptimizer, weight: keras.Variable) -> None:
    opt.apply([ops.ones(weight.shape)], [weight])


def scaled_step(opt: LossScaledOptimizer, weight: keras.Variable) -> None:
    opt.apply([ops.ones(weight.shape) * opt.scale_loss(ops.ones(()))], [weight])


@pytest.fixture
def _told_again() -> None:
    polyamp.errors.forget_warnings()


@pytest.mark.usefixtures("_told_again")
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("begin", [optimizer, trained_by_fit])
def test_a_loss_that_nobody_scaled_is_told_whatever_was_scaled_before(begin: Any, steps: int) -> None:
    weight, opt = begin()
    for _ in range(steps):
        scaled_step(opt, weight)
    with pytest.warns(polyamp.PolyampWarning, match="no loss was scaled"):
        unscaled_step(opt, weight)


@pytest.mark.usefixtures("_told_again")
def test_one_loss_serves_several_groups_and_several_losses_wait() -> None:
    parts = [keras.Variable([0.0]), keras.Variable([0.0])]
    opt = LossScaledOptimizer(keras.optimizers.SGD(1.0), LossScale(init=8.0))
    opt.build(parts)
    for _ in range(3):
        grads = [ops.ones((1,)) * opt.scale_loss(ops.ones(())) for _ in parts]
        for grad in grads:
            for part in parts:
                opt.apply([grad], [part])
    assert [to_numpy(part).tolist() for part in parts] == [[-6.0], [-6.0]]


@pytest.mark.usefixtures("_told_again")
def test_an_optimizer_whose_scale_was_read_by_hand_may_have_scaled_any_loss() -> None:
    weight, opt = optimizer()
    scaled_step(opt, weight)
    opt.scaler.note_by_hand()
    unscaled_step(opt, weight)
