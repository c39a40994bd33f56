"""`LossScaler` in loops around ``tf.GradientTape``, with any optimizer that has ``apply_gradients``."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp import LossScale
from polyamp.backends.tensorflow import LossScaler

SGD = tf.compat.v1.train.GradientDescentOptimizer


class Own:
    """A user's own optimizer, which only has ``apply_gradients``."""

    def apply_gradients(self, pairs: list[tuple[tf.Tensor, tf.Variable]]) -> None:
        for grad, variable in pairs:
            variable.assign_sub(grad)


EIGHT = LossScale(init=8.0)


@pytest.mark.parametrize("source", [EIGHT, polyamp.policy("mixed_float16", loss_scale=EIGHT)])
def test_settings_come_from_a_config_or_a_policy(source: Any) -> None:
    assert LossScaler(source).loss_scale == 8.0
    with polyamp.policy("mixed_float16"):
        assert LossScaler().loss_scale == 2.0**16


@pytest.mark.parametrize("mode", ["eager", "function", "xla"])
@pytest.mark.parametrize("make", [lambda: SGD(1.0), Own])
def test_steps_skip_and_apply(mode: str, make: Any) -> None:
    weight, scaler, opt = tf.Variable([1.0, 2.0]), LossScaler(LossScale(init=8.0), max_grad_norm=2.5), make()

    def step(factor: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            scaled = scaler.scale(tf.reduce_sum(weight * factor))
        result = scaler.step(opt, [(tape.gradient(scaled, weight), weight)])
        return result.applied

    run = step if mode == "eager" else tf.function(step, jit_compile=mode == "xla")
    if mode != "eager":
        assert not run(tf.constant([np.inf, 1.0]))
        assert weight.numpy().tolist() == [1.0, 2.0]
        assert scaler.loss_scale == 4.0
    assert run(tf.constant([3.0, 4.0]))  # a norm of 5
    assert weight.numpy().tolist() == [-0.5, 0.0]


def test_unscale_is_float32_and_says_whether_all_is_finite() -> None:
    scaler = LossScaler(LossScale.fixed(2.0**16))
    grads, finite = scaler.unscale([tf.constant([2.0**-14], tf.float16), None, tf.constant([1.0], tf.float64)])
    assert [None if grad is None else (grad.dtype, grad.numpy().tolist()) for grad in grads] == [
        (tf.float32, [2.0**-30]),
        None,
        (tf.float64, [2.0**-16]),
    ]
    assert bool(finite)
    assert not bool(scaler.unscale([tf.constant([1.0]), tf.constant([-np.inf], tf.bfloat16)])[1])


def test_limits_are_said_at_once_in_eager_code_and_when_somebody_looks_after_a_graph() -> None:
    config, weight, bad = LossScale(max_skips=2), tf.Variable([0.0]), tf.constant([np.nan])
    eager, traced = LossScaler(config), LossScaler(config)
    eager.step(Own(), [(bad, weight)])
    with pytest.raises(polyamp.errors.LossScaleError, match="2 steps in a row"):
        eager.step(Own(), [(bad, weight)])
    step = tf.function(lambda: traced.step(Own(), [(bad, weight)]).applied)
    assert [bool(step()) for _ in range(2)] == [False, False]
    with pytest.raises(polyamp.errors.LossScaleError, match="2 steps in a row"):
        _ = traced.last_step


def test_results_keep_what_they_were() -> None:
    weight, scaler = tf.Variable([0.0]), LossScaler(LossScale(init=8.0))
    first = scaler.step(Own(), [(tf.constant([np.nan]), weight)])
    scaler.step(Own(), [(tf.constant([1.0]), weight)])
    assert (first.applied, first.scale, first.skipped_in_a_row) == (False, 4.0, 1)


@pytest.mark.parametrize("added", [np.inf, np.nan])
def test_a_loss_in_a_function_that_is_not_finite_skips_the_step_although_its_gradients_are(added: float) -> None:
    weight, scaler = tf.Variable([1.0]), LossScaler("mixed_float16")

    @tf.function
    def step(added: Any) -> None:
        with tf.GradientTape() as tape:
            scaled = scaler.scale(tf.reduce_sum(weight) + added)
        scaler.step(Own(), [(tape.gradient(scaled, weight), weight)])

    step(tf.constant(added))
    assert (scaler.last_step.applied, weight.numpy().tolist()) == (False, [1.0])
    step(tf.constant(0.0))
    assert scaler.last_step.applied


@pytest.mark.parametrize("grads", [3, None, tf.ones(2), [[tf.ones(1)]], [{}], [2], [tf.constant([2])]], ids=str)
def test_what_are_no_gradients_is_refused(grads: Any) -> None:
    weight, scaler = tf.Variable([1.0]), LossScaler(EIGHT)
    pairs = [(grad, weight) for grad in grads] if isinstance(grads, list) else grads
    with pytest.raises(polyamp.errors.InvalidTypeError, match="a list of gradients"):
        scaler.unscale(grads)
    with pytest.raises(polyamp.errors.InvalidTypeError, match="a list of gradients"):
        scaler.step(Own(), pairs)
    assert (scaler.loss_scale, weight.numpy().tolist()) == (8.0, [1.0])


@pytest.mark.parametrize("loss", [3, "loss", None, tf.constant(3)])
def test_what_is_no_loss_is_refused(loss: Any) -> None:
    with pytest.raises(polyamp.errors.InvalidTypeError, match="a floating-point tensor"):
        LossScaler("mixed_float16").scale(loss)


@pytest.mark.parametrize(
    ("make", "match"),
    [(object, "needs an optimizer"), (lambda: polyamp.wrap_optimizer(SGD(0.1), "O1"), "scales losses itself")],
)
def test_what_is_no_plain_optimizer_is_refused(make: Any, match: str) -> None:
    with pytest.raises(polyamp.PolyampError, match=match):
        LossScaler("mixed_float16").step(make(), [(tf.ones(1), tf.Variable([0.0]))])
