"""``enable_mixed_precision_graph_rewrite`` of TensorFlow 1: in a Session, in functions, and with Keras 3."""

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp.backends.tensorflow import (
    disable_mixed_precision_graph_rewrite,
    enable_mixed_precision_graph_rewrite,
)

v1 = tf.compat.v1
X, W = (tf.constant(np.random.default_rng(seed).standard_normal((8, 8)), tf.float32) for seed in range(2))


@pytest.fixture(autouse=True)
def _off_before_and_after() -> Iterator[None]:
    assert not is_half(X @ W)
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where it was not enabled
        disable_mixed_precision_graph_rewrite()


def sgd() -> Any:
    return v1.train.GradientDescentOptimizer(0.1)


def is_half(value: tf.Tensor) -> bool:
    return bool(tf.reduce_all(tf.cast(tf.cast(value, tf.float16), tf.float32) == value))


def build(x: Any) -> Any:
    weights = [v1.get_variable(name, (8, 8), initializer=v1.glorot_uniform_initializer(seed=1)) for name in "ab"]
    return v1.reduce_mean(v1.square(tf.nn.relu(x @ weights[0]) @ weights[1] - x))


def products_behind(operation: tf.Operation) -> set[str]:
    """Return the types of the products that running an operation runs."""
    found, waiting = set(), [operation]
    while waiting:
        one = waiting.pop()
        if one.name not in found:
            found.add(one.name)
            waiting += [value.op for value in one.inputs] + list(one.control_inputs)
    operations = map(operation.graph.get_operation_by_name, found)
    return {one.get_attr("T").name for one in operations if one.type == "MatMul"}


@pytest.fixture
def _control_flow_1() -> Iterator[None]:
    v1.disable_control_flow_v2()
    yield
    v1.enable_control_flow_v2()


@pytest.mark.usefixtures("_control_flow_1")  # as after tf.disable_v2_behavior()
@pytest.mark.parametrize(("is_built_before", "use_resource"), [(False, True), (True, True), (True, False)])
def test_a_session_trains_in_half_and_matches_float32(is_built_before: bool, use_resource: bool) -> None:
    def losses(wrap: Callable[[Any], Any]) -> tuple[list[float], set[str]]:
        with tf.Graph().as_default(), v1.variable_scope("model", use_resource=use_resource):
            x = v1.placeholder(tf.float32, (8, 8))
            loss = build(x) if is_built_before else None
            opt = wrap(v1.train.AdamOptimizer(0.05))
            loss = build(x) if loss is None else loss
            train = opt.minimize(loss)
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                found = [float(session.run([loss, train], {x: X.numpy()})[0]) for _ in range(10)]
            assert {variable.dtype.base_dtype for variable in v1.trainable_variables()} == {tf.float32}
            return found, products_behind(loss.op) | products_behind(train)

    full, types = losses(lambda opt: opt)
    assert types == {"float32"}
    half, types = losses(enable_mixed_precision_graph_rewrite)
    assert types == {"float16"}
    assert half != full
    np.testing.assert_allclose(half, full, rtol=2e-3)


@pytest.mark.usefixtures("_control_flow_1")
def test_products_in_a_loop_that_was_built_before_are_reported() -> None:
    with tf.Graph().as_default() as graph:
        v1.while_loop(lambda count, _: count < 2, lambda count, x: (count + 1, x @ x), (0, X.numpy()))
        with pytest.warns(polyamp.PolyampWarning, match="1 products of the default graph, while/.* stay float32"):
            enable_mixed_precision_graph_rewrite(sgd())
        enable_mixed_precision_graph_rewrite(sgd())  # reported once
    assert {op.get_attr("T").name for op in graph.get_operations() if op.type == "MatMul"} == {"float32"}


def test_functions_are_traced_anew_and_go_back() -> None:
    traces: list[int] = []

    @tf.function
    def function(x: tf.Tensor) -> tf.Tensor:
        traces.append(1)
        return x @ W

    full = function(X)
    enable_mixed_precision_graph_rewrite(sgd())
    assert is_half(function(X))
    disable_mixed_precision_graph_rewrite()
    assert np.array_equal(function(X), full)
    assert not is_half(full)
    assert len(traces) == 2


def test_keras_compile_and_fit() -> None:
    keras.utils.set_random_seed(0)
    opt = enable_mixed_precision_graph_rewrite(keras.optimizers.Adam(0.01))
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(8)])
    model.compile(opt, "mse")
    losses = model.fit(X, X, epochs=5, verbose=0).history["loss"]
    assert losses[4] < losses[0]
    assert float(opt.dynamic_scale) == 2.0**15
    assert is_half(keras.ops.matmul(X, model.layers[0].kernel))
    assert all(variable.dtype == "float32" for variable in model.trainable_variables)


def test_it_reaches_threads_and_an_inner_float32_policy_switches_it_off() -> None:
    enable_mixed_precision_graph_rewrite(sgd())
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(is_half(X @ W)))
    thread.start()
    thread.join()
    with polyamp.autocast("float32", backend="tensorflow"):
        found.append(is_half(X @ W))
    assert found == [True, False]


def test_a_second_optimizer_is_wrapped_too_and_a_wrapped_one_refused() -> None:
    first, second = (enable_mixed_precision_graph_rewrite(sgd()) for _ in range(2))
    assert first is not second
    with pytest.raises(polyamp.errors.UsageError, match="wrapped already"):
        enable_mixed_precision_graph_rewrite(first)
    disable_mixed_precision_graph_rewrite()
    assert not is_half(X @ W)


def test_disabling_what_is_not_enabled_is_said_once() -> None:
    with pytest.warns(polyamp.PolyampWarning, match="was not enabled"):
        disable_mixed_precision_graph_rewrite()
    disable_mixed_precision_graph_rewrite()


def settings(opt: Any) -> tuple[float, float, float, float]:
    chosen = opt.scaler.settings
    return chosen.init, chosen.growth, chosen.backoff, chosen.interval


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
    assert not is_half(X @ W)
