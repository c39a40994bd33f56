"""A loss that was not scaled, and gradients clipped while they are scaled, are found in the step's graph."""

import warnings
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

import polyamp
from polyamp.backends.tensorflow import LossScaler

v1 = tf.compat.v1
X = tf.ones((3, 4))
F16 = polyamp.policy("mixed_float16")
SMALL = polyamp.LossScale(init=8.0)


class Loop:
    """A step in one of several forms, and with or without its mistakes."""

    def __init__(self, form: str, *, scales: bool = True, change: Callable[[Any], Any] | None = None) -> None:
        self.weight, self.scales, self.change = tf.Variable(tf.ones((4, 2))), scales, change
        self.scaler = LossScaler(SMALL)
        self.opt = polyamp.wrap_optimizer(keras.optimizers.SGD(0.1), F16, loss_scale=SMALL)
        self.opt.build([self.weight])
        self.legacy = polyamp.wrap_optimizer(v1.train.GradientDescentOptimizer(0.1), F16, loss_scale=SMALL)
        self.step: Any = getattr(self, form)

    def loss(self, x: Any) -> Any:
        return tf.reduce_mean(tf.square(x @ self.weight))

    def grads(self, x: Any, scale: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = self.loss(x)
            target = scale(loss) if self.scales else loss
        grads = tape.gradient(target, [self.weight])
        return grads if self.change is None else self.change(grads)

    def scaler_step(self, x: Any) -> None:
        self.scaler.step(v1.train.GradientDescentOptimizer(0.1), [(self.grads(x, self.scaler.scale)[0], self.weight)])

    def unscale(self, x: Any) -> None:
        grads, _ = self.scaler.unscale(self.grads(x, self.scaler.scale))
        self.weight.assign_sub(0.1 * grads[0])

    def keras_step(self, x: Any) -> None:
        self.opt.apply_gradients(zip(self.grads(x, self.opt.scale_loss), [self.weight], strict=True))

    def legacy_step(self, x: Any) -> None:
        self.legacy.apply_gradients([(self.grads(x, self.legacy.scale_loss)[0], self.weight)])

    def called(self, x: Any) -> None:
        tf.function(self.scaler_step)(x)

    def branched(self, x: Any) -> None:
        tf.cond(tf.reduce_sum(x) > 0.0, lambda: self.scaler_step(x), lambda: None)

    def looped(self, x: Any) -> None:
        for _ in tf.range(2):
            self.scaler_step(x)

    def over_data(self, x: Any) -> None:
        for batch in tf.data.Dataset.from_tensors(x):
            self.scaler_step(batch)

    def logged(self, x: Any) -> Any:
        """Reading the scale is not scaling."""
        self.scaler_step(x)
        return self.scaler.state.scale


FORMS = ["scaler_step", "unscale", "keras_step", "legacy_step", "called", "branched", "looped", "over_data", "logged"]


def by_norm(grads: Any) -> Any:
    return tf.clip_by_global_norm(grads, 1.0)[0]


def by_value(grads: Any) -> Any:
    return [tf.clip_by_value(grad, -1.0, 1.0) for grad in grads]


def by_hand(grads: Any) -> Any:
    norm = tf.sqrt(tf.add_n([tf.nn.l2_loss(grad) for grad in grads]))
    return [grad * tf.minimum(1.0, 1.0 / norm) for grad in grads]


def averaged(grads: Any) -> Any:
    return [grad / 2.0 for grad in grads]


@pytest.mark.parametrize("form", FORMS)
def test_a_step_whose_loss_nobody_scaled_is_refused_by_rewrite(form: str) -> None:
    loop = Loop(form, scales=False)
    with pytest.raises(polyamp.errors.UsageError, match=r"was not scaled[\s\S]*test_scaling.py"):
        polyamp.rewrite(loop.step, X, policy=F16, backend="tensorflow")


@pytest.mark.filterwarnings("error::polyamp.PolyampWarning")
@pytest.mark.parametrize("form", FORMS)
def test_a_step_whose_loss_was_scaled_is_not(form: str) -> None:
    loop = Loop(form, change=averaged)
    polyamp.rewrite(loop.step, X, policy=F16, backend="tensorflow")(X)
    assert loop.weight.numpy()[0, 0] < 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "change"),
    [
        *(("scaler_step", change) for change in (by_norm, by_value, by_hand)),
        *((form, by_norm) for form in ("keras_step", "legacy_step", "called")),
    ],
)
def test_clipping_what_is_scaled_is_said(form: str, change: Any) -> None:
    loop = Loop(form, change=change)
    with pytest.warns(polyamp.PolyampWarning, match="clipped while they are scaled.*test_scaling.py"):
        polyamp.rewrite(loop.step, X, policy=F16, backend="tensorflow")


@pytest.mark.slow
@pytest.mark.filterwarnings("error::polyamp.PolyampWarning")
def test_clipping_what_was_unscaled_is_not_mentioned() -> None:
    weight, scaler = tf.Variable(tf.ones((4, 2))), LossScaler(F16)
    legacy = polyamp.wrap_optimizer(v1.train.GradientDescentOptimizer(0.1), F16)

    def own(x: Any) -> None:
        with tf.GradientTape() as tape:
            scaled = scaler.scale(tf.reduce_mean(x @ weight))
        grads, _ = scaler.unscale(tape.gradient(scaled, [weight]))
        weight.assign_sub(0.1 * by_norm(grads)[0])

    def wrapped(x: Any) -> None:
        pairs = legacy.compute_gradients(lambda: tf.reduce_mean(x @ weight), [weight])
        legacy.apply_gradients([(by_value([grad])[0], one) for grad, one in pairs])

    for step in (own, wrapped):
        polyamp.rewrite(step, X, policy=F16, backend="tensorflow")


def test_gradients_that_are_given_are_not_judged() -> None:
    weight, scaler = tf.Variable(tf.ones((4, 2))), LossScaler(F16)

    def step(grad: Any, x: Any) -> Any:
        scaler.step(v1.train.GradientDescentOptimizer(0.1), [(grad, weight)])
        return x @ weight

    with warnings.catch_warnings():
        warnings.simplefilter("error", polyamp.PolyampWarning)
        polyamp.rewrite(step, tf.ones((4, 2)), X, policy=F16)
