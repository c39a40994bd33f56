"""Values that `polyamp.rewrite` keeps out of 16 bits: the user's data, squares, reciprocals, numbers near 0 or 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from polyamp.backends.tensorflow import explain, rewrite, rewritten_graph
from support.tensorflow_cases import POLICIES, nodes_that_run, normal, planned, relative_error

FP16 = "mixed_float16"
WEIGHT = tf.Variable(np.eye(4, dtype="float32"))
WAYS = tf.constant([1.0, 2.0, 3.0, 4.0])
LOGITS = tf.constant([[12.0, -12.0, 3.0, -3.0]])
STEEP = tf.constant([[25.0, -25.0, 3.0, -3.0]])
LABELS = tf.constant([[0.0, 1.0, 1.0, 0.0]])
WRONG = tf.constant([[0.0, 1.0, 0.0, 1.0]])


def with_gradient(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(*args: Any) -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(loss(*args))
        return value, tape.gradient(value, WEIGHT)

    return step


def check(loss: Callable[..., Any], *args: Any, policy: str, close: float = 2.0**-6) -> Any:
    """Check that the loss and its gradient are those of float32, within a few roundings of the products."""
    step = with_gradient(loss)
    fast = rewrite(step, *args, policy=policy)
    for found, expected in zip(fast(*args), tf.function(step)(*args), strict=True):
        assert np.all(np.isfinite(expected))
        assert relative_error(found, expected) < close
    return fast.plan


def cross_entropy(p: Any, y: Any) -> Any:
    return -tf.reduce_mean(y * tf.math.log(p) + (1 - y) * tf.math.log(1 - p))


def clipped(x: Any, y: Any) -> Any:
    return cross_entropy(tf.clip_by_value(tf.sigmoid(x @ WEIGHT), 1e-7, 1 - 1e-7), y)


def by_keras(x: Any, y: Any) -> Any:
    return keras.ops.binary_crossentropy(y, tf.sigmoid(x @ WEIGHT) * 1.0)


def by_keras_reshaped(x: Any, y: Any) -> Any:
    return keras.losses.BinaryCrossentropy()(tf.reshape(y, (4,)), tf.reshape(tf.sigmoid(x @ WEIGHT), (4,)))


def with_epsilon(x: Any, y: Any) -> Any:
    p = tf.sigmoid(x @ WEIGHT)
    return -tf.reduce_mean(y * tf.math.log(p + 1e-12) + (1 - y) * tf.math.log(1 - p + 1e-12))


def focal(x: Any, y: Any) -> Any:
    p = tf.sigmoid(x @ WEIGHT)
    right = y * p + (1 - y) * (1 - p)
    return -tf.reduce_mean((1 - right) ** 2 * tf.math.log(right + 1e-8))


def behind_a_function(x: Any, y: Any) -> Any:
    return cross_entropy(tf.function(lambda x: tf.clip_by_value(tf.sigmoid(x), 1e-7, 1 - 1e-7))(x @ WEIGHT), y)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("loss", [clipped, by_keras, by_keras_reshaped, with_epsilon, focal])
def test_losses_of_probabilities(loss: Any, policy: str) -> None:
    check(loss, LOGITS, LABELS, policy=policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_loss_of_probabilities_behind_a_function(policy: str) -> None:
    found = rewrite(behind_a_function, policy=policy)(LOGITS, LABELS)
    assert relative_error(found, behind_a_function(LOGITS, LABELS)) < 1e-3


@pytest.mark.parametrize("policy", POLICIES)
def test_logarithms_of_probabilities_that_16_bits_round_to_0(policy: str) -> None:
    check(lambda x: -tf.math.log(tf.sigmoid(x @ WEIGHT) + 1e-12), STEEP, policy=policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_saturates_is_a_result_unrounded(policy: str) -> None:
    x = tf.constant([[9.0, -17.5, 3.0, -3.0]])
    found = rewrite(lambda x: tf.sigmoid(x @ WEIGHT), policy=policy)(x)
    assert relative_error(found, tf.sigmoid(x)) < 1e-6
    with tf.Graph().as_default() as graph:
        y = tf.sigmoid(tf.constant(x.numpy()) @ np.eye(4, dtype="float32"), name="y")
    ours = rewritten_graph(graph.as_graph_def(), policy)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.graph_util.import_graph_def(ours, name="")
        served = session.run(y.name)
    assert relative_error(served, tf.sigmoid(x)) < 1e-6


def l2(h: Any) -> Any:
    return h / tf.maximum(tf.norm(h, axis=-1, keepdims=True), 1e-12)


def l2_by_keras(h: Any) -> Any:
    return h / keras.ops.maximum(keras.ops.norm(h, axis=-1, keepdims=True), 1e-12)


def rms(h: Any) -> Any:
    return h * tf.math.rsqrt(tf.reduce_mean(h * h) + 1e-12)


def rms_seen_through(h: Any) -> Any:
    flat, other = tf.reshape(h, (-1,)), tf.reshape(tf.identity(h), (-1,))
    return h * tf.math.rsqrt(tf.reduce_mean(flat * tf.math.conj(other)) + 1e-12)


def rms_of_the_same_shape(h: Any) -> Any:
    return h * tf.math.rsqrt(tf.reduce_mean(h * tf.reshape(h, (1, 4))) + 1e-12)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("factor", [100.0, 1e-3])
@pytest.mark.parametrize("norm", [l2, l2_by_keras, rms, rms_seen_through, rms_of_the_same_shape])
def test_a_product_of_a_value_with_itself_is_a_square(norm: Any, factor: float, policy: str) -> None:
    plan = check(lambda x: WAYS * norm(x * factor @ WEIGHT), LOGITS, policy=policy)
    assert not planned(plan, "square").keys() - {"float32"}


def test_other_products_are_none() -> None:
    def outer(x: Any) -> Any:
        y = x @ WEIGHT
        return y[:, :, None] * y[:, None, :] + tf.reshape(y, (1, 1, 4)) * tf.reshape(y, (1, 4, 1))

    assert "square" not in planned(explain(outer, LOGITS, policy=FP16), "square", "mul").elements()
    assert planned(explain(outer, LOGITS, policy=FP16), "mul") == {"float16": 2}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_mean_of_squared_errors_by_product(policy: str) -> None:
    target = tf.constant([[1000.1, 0.5, 2.0, 3.0]])
    check(lambda x, y: tf.reduce_mean((lambda e: e * e)(x @ WEIGHT - y)) * 1e-3, LOGITS * 30.0, target, policy=policy)


@pytest.mark.parametrize("numerator", [1.0, tf.constant(3.0), tf.ones(4)])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_constant_over_a_value_is_a_reciprocal(policy: str, numerator: Any) -> None:
    plan = check(lambda x: numerator / (tf.nn.relu(x @ WEIGHT) + 1e-5) * 1e-2, LOGITS, policy=policy)
    assert planned(plan, "reciprocal")["float32"] >= 1


# The user's data.


def added(x: Any, y: Any) -> Any:
    return tf.nn.softmax(x @ WEIGHT + y) * WAYS


def cast(x: Any, y: Any) -> Any:
    return (x @ WEIGHT - tf.cast(y, tf.float32)) * 1e-5


DATA = {
    "a mask": (added, tf.fill((1, 4), -1e9)),
    "labels": (lambda x, y: (x @ WEIGHT - y) * 1e-5, tf.fill((1, 4), 1e5)),
    "integers": (cast, tf.fill((1, 4), 100_000)),
    "positions": (lambda x, y: tf.sin(x @ WEIGHT + y), tf.constant([[5000.0, 2049.0, 3.0, 1e4]])),
    "a maximum": (lambda x, y: tf.maximum(x @ WEIGHT, y) * 1e-5, tf.fill((1, 4), 1e5)),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", DATA)
def test_float32_data_are_not_cast_beside_a_product(name: str, policy: str) -> None:
    loss, data = DATA[name]
    check(loss, LOGITS, data, policy=policy)
    check(tf.function(loss), LOGITS, data, policy=policy)  # in a separate function


def test_elements_of_a_dataset_and_what_an_outer_function_traces_are_data() -> None:
    data = tf.data.Dataset.from_tensors(tf.fill((1, 4), 1e5))

    def read(x: Any) -> Any:
        return x @ WEIGHT - next(iter(data))

    @tf.function
    def outer(x: Any, y: Any) -> Any:
        y = y * 1.0
        return rewrite(lambda x: x @ WEIGHT - y, policy=FP16)(x)

    assert np.all(np.isfinite(rewrite(read, policy=FP16)(LOGITS)))
    assert np.all(np.isfinite(outer(LOGITS, tf.fill((1, 4), 1e5))))
    assert planned(explain(read, LOGITS, policy=FP16), "sub") == {"float32": 1}


def test_what_a_function_captured_is_a_constant() -> None:
    for value, format_name in ((1e5, "float32"), (1e3, "float16")):
        captured = tf.fill((1, 4), value)
        plan = explain(lambda x, y=captured: x @ WEIGHT - y, LOGITS, policy=FP16)
        assert planned(plan, "sub") == {"float32": 1}  # a default is an argument
        plan = explain(lambda x: x @ WEIGHT - captured, LOGITS, policy=FP16)  # noqa: B023
        assert planned(plan, "sub") == {format_name: 1}


def test_sizes_booleans_and_random_bits_are_no_data() -> None:
    def forward(x: Any) -> Any:
        y = x @ WEIGHT / tf.cast(tf.shape(x)[0], tf.float32)
        return y * tf.cast(y > 0, tf.float32) + tf.random.uniform((1, 4))

    assert planned(explain(forward, LOGITS, policy=FP16), "div", "mul", "add") == {"float16": 3}


# Sums, and coefficients.


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "gather",
    [
        tf.gather,
        lambda y, ids: tf.gather_nd(y, ids[:, None]),
        lambda y, ids: tf.gather_nd(y, tf.stack([ids, ids], 1))[:, None] * tf.ones(4),
    ],
)
def test_the_gradient_of_a_look_up_is_a_sum(gather: Any, policy: str) -> None:
    ids = tf.zeros(4096, tf.int32)
    check(lambda x: tf.reduce_sum(gather(x @ WEIGHT, ids) @ WAYS[:, None]) * 1e-4, LOGITS, policy=policy)


def test_the_coefficients_of_a_matrix_exponential_fit_in_no_16_bits() -> None:
    x = normal(4, 4, seed=3, scale=1.0)
    check(lambda x: WAYS * tf.linalg.expm(x @ WEIGHT), x, policy=FP16)


def test_work_that_is_done_twice_is_counted() -> None:
    step = with_gradient(clipped)
    fast = rewrite(step, LOGITS, LABELS, policy=FP16)
    nodes = nodes_that_run(fast, LOGITS, LABELS)
    again = [node.op for node in nodes if node.name.endswith("/polyamp_float32")]
    assert "Sigmoid" in again
    casts = [node for node in nodes if node.op == "Cast" and "polyamp_cast" in node.name]
    assert fast.plan.totals["casts"] == len(casts)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_quotient_of_what_saturates(policy: str) -> None:
    x = tf.constant([[12.0, 9.0, -12.0, -3.0]])

    def logit(x: Any) -> Any:
        p = tf.sigmoid(x @ WEIGHT)
        return WAYS * tf.math.log(p / (1 - p))

    check(logit, x, policy=policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_gradient_of_a_sigmoid_that_a_loss_took_unrounded(policy: str) -> None:
    """In ``p * (1 - p)`` a ``p`` near 1 must not be rounded."""
    x = tf.fill((700, 4), 4.0)

    def dice(x: Any) -> Any:
        p = tf.sigmoid(x @ WEIGHT)
        return (2 * tf.reduce_sum(p * p) + 1e-6) / (tf.reduce_sum(p) + tf.reduce_sum(p * p) + 1e-6)

    check(dice, x, policy=policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_sums_of_many_are_float32(policy: str) -> None:
    """Kernels of some devices add up in 16 bits."""
    bias = tf.Variable(tf.zeros(4))

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.bias_add(x @ WEIGHT, bias))
        return tape.gradient(loss, bias)

    assert relative_error(rewrite(step, policy=policy)(tf.ones((4096, 4))), tf.fill((4,), 4096.0)) < 1e-3
    pool = lambda x: tf.nn.avg_pool2d(tf.reshape(x @ WEIGHT, (1, 64, 64, 4)), 64, 64, "VALID")  # noqa: E731
    assert relative_error(rewrite(pool, policy=policy)(tf.fill((4096, 4), 100.0)), tf.fill((4,), 100.0)) < 1e-2
