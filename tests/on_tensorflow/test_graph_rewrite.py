"""``enable_mixed_precision_graph_rewrite`` of TensorFlow 1: TensorFlow's own pass, and a wrapped optimizer."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import pytest
import tensorflow as tf

import polyamp
from polyamp.backends.tensorflow import (
    disable_mixed_precision_graph_rewrite,
    enable_mixed_precision_graph_rewrite,
)

v1 = tf.compat.v1
WITHOUT_GPU = pytest.mark.filterwarnings("ignore:TensorFlow's graph rewrite does nothing here")


def is_enabled() -> tuple[bool, bool]:
    """Return whether TensorFlow's pass is on in functions, and in a new Session."""
    with tf.Graph().as_default(), v1.Session() as session:
        in_sessions = session.run(v1.placeholder_with_default(1.0, ())) and session._config is not None
        rewriting = session._config.graph_options.rewrite_options.auto_mixed_precision if in_sessions else 0
    return bool(tf.config.optimizer.get_experimental_options().get("auto_mixed_precision")), rewriting == 1


@pytest.fixture(autouse=True)
def _off_before_and_after() -> Iterator[None]:
    assert is_enabled() == (False, False)
    yield
    disable_mixed_precision_graph_rewrite()


def sgd() -> Any:
    return v1.train.GradientDescentOptimizer(0.1)


@WITHOUT_GPU
def test_tensorflows_pass_is_switched_on_and_off() -> None:
    enable_mixed_precision_graph_rewrite(sgd())
    assert is_enabled() == (True, True)
    disable_mixed_precision_graph_rewrite()
    assert is_enabled() == (False, False)


@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="there is a GPU")
def test_without_a_gpu_it_says_that_the_pass_does_nothing() -> None:
    with pytest.warns(polyamp.PolyampWarning, match="needs a GPU(?s:.*)polyamp.rewrite"):
        enable_mixed_precision_graph_rewrite(sgd())


@WITHOUT_GPU
def test_a_session_trains_and_skips() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        factor = v1.placeholder(tf.float32, [2])
        weight = v1.get_variable("weight", initializer=tf.constant([1.0, -2.0]))
        opt = enable_mixed_precision_graph_rewrite(sgd())
        train = opt.minimize(tf.reduce_sum(weight * factor))
        session.run(v1.global_variables_initializer())
        for value, scale in ((10.0, 2.0**15), (float("inf"), 2.0**14)):
            session.run(train, {factor: [value, 0.0]})
            assert session.run(weight).tolist() == [0.0, -2.0]
            assert session.run(opt.scaler.stored[0]) == scale


@WITHOUT_GPU
def test_a_second_optimizer_is_wrapped_too_and_a_wrapped_one_refused() -> None:
    first, second = (enable_mixed_precision_graph_rewrite(sgd()) for _ in range(2))
    assert first is not second
    with pytest.raises(polyamp.errors.UsageError, match="wrapped already"):
        enable_mixed_precision_graph_rewrite(first)


def settings(opt: Any) -> tuple[float, float, float, float]:
    chosen = opt.scaler.settings
    return chosen.init, chosen.growth, chosen.backoff, chosen.interval


@WITHOUT_GPU
@pytest.mark.parametrize(
    "make",
    [
        lambda: 128,
        lambda: 128.0,
        lambda: polyamp.LossScale.fixed(128),
        lambda: v1.mixed_precision.FixedLossScale(128),
    ],
    ids=["int", "float", "LossScale", "FixedLossScale"],
)
def test_fixed_loss_scales(make: Callable[[], Any]) -> None:
    opt = enable_mixed_precision_graph_rewrite(sgd(), make())
    assert (opt.loss_scale, opt.scaler.settings.dynamic) == (128.0, False)


@WITHOUT_GPU
def test_tensorflows_dynamic_loss_scale_keeps_its_settings() -> None:
    theirs = v1.mixed_precision.DynamicLossScale(initial_loss_scale=2.0**10, increment_period=7, multiplier=4.0)
    assert settings(enable_mixed_precision_graph_rewrite(sgd(), theirs)) == (2.0**10, 4.0, 0.25, 7)


@pytest.mark.parametrize(
    ("opt", "loss_scale", "error"),
    [
        (tf.Variable(1.0), "dynamic", polyamp.errors.InvalidTypeError),
        *((sgd(), wrong, polyamp.errors.InvalidTypeError) for wrong in ("static", None, True)),
        *((sgd(), wrong, polyamp.errors.InvalidValueError) for wrong in (-1.0, float("nan"))),
    ],
)
def test_what_is_refused_switches_nothing_on(opt: Any, loss_scale: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        enable_mixed_precision_graph_rewrite(opt, loss_scale)
    assert is_enabled() == (False, False)


def test_an_optimizer_of_keras_is_told_to_convert_its_model() -> None:
    with pytest.raises(polyamp.errors.InvalidTypeError, match=r"polyamp\.convert\(model"):
        enable_mixed_precision_graph_rewrite(keras.optimizers.Adam(0.01))
