"""Values that `polyamp.rewrite` keeps out of 16 bits, in TensorFlow's own ways to write them.

The ways of every framework are in tests/parity/test_traps.py.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from polyamp.backends.tensorflow import explain, rewrite
from support.tensorflow_cases import POLICIES, nodes_that_run, planned, relative_error

FP16 = "mixed_float16"
WEIGHT = tf.Variable(np.eye(4, dtype="float32"))
WAYS = tf.constant([1.0, 2.0, 3.0, 4.0])
LOGITS = tf.constant([[12.0, -12.0, 3.0, -3.0]])
LABELS = tf.constant([[0.0, 1.0, 1.0, 0.0]])


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


def behind_a_function(x: Any, y: Any) -> Any:
    return cross_entropy(tf.function(lambda x: tf.clip_by_value(tf.sigmoid(x), 1e-7, 1 - 1e-7))(x @ WEIGHT), y)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("loss", [by_keras, by_keras_reshaped])
def test_losses_of_probabilities(loss: Any, policy: str) -> None:
    check(loss, LOGITS, LABELS, policy=policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_loss_of_probabilities_behind_a_function(policy: str) -> None:
    found = rewrite(behind_a_function, policy=policy)(LOGITS, LABELS)
    assert relative_error(found, behind_a_function(LOGITS, LABELS)) < 1e-3


@pytest.mark.parametrize("policy", POLICIES)
def test_what_saturates_is_a_result_unrounded(policy: str) -> None:
    x = tf.constant([[9.0, -17.5, 3.0, -3.0]])
    found = rewrite(lambda x: tf.sigmoid(x @ WEIGHT), policy=policy)(x)
    assert relative_error(found, tf.sigmoid(x)) < 1e-6
    with tf.Graph().as_default() as graph:
        y = tf.sigmoid(tf.constant(x.numpy()) @ np.eye(4, dtype="float32"), name="y")
    ours = rewrite(graph.as_graph_def(), policy=policy)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.graph_util.import_graph_def(ours, name="")
        served = session.run(y.name)
    assert relative_error(served, tf.sigmoid(x)) < 1e-6


def l2_by_keras(h: Any) -> Any:
    return h / keras.ops.maximum(keras.ops.norm(h, axis=-1, keepdims=True), 1e-12)


def rms_seen_through(h: Any) -> Any:
    flat, other = tf.reshape(h, (-1,)), tf.reshape(tf.identity(h), (-1,))
    return h * tf.math.rsqrt(tf.reduce_mean(flat * tf.math.conj(other)) + 1e-12)


@pytest.mark.parametrize("factor", [100.0, 1e-3])
@pytest.mark.parametrize("norm", [l2_by_keras, rms_seen_through])
def test_a_product_of_a_value_with_itself_is_a_square(norm: Any, factor: float) -> None:
    plan = check(lambda x: WAYS * norm(x * factor @ WEIGHT), LOGITS, policy=FP16)
    assert not planned(plan, "square").keys() - {"float32"}


def test_other_products_are_none() -> None:
    def outer(x: Any) -> Any:
        y = x @ WEIGHT
        return y[:, :, None] * y[:, None, :] + tf.reshape(y, (1, 1, 4)) * tf.reshape(y, (1, 4, 1))

    assert "square" not in planned(explain(outer, LOGITS, policy=FP16), "square", "mul").elements()
    assert planned(explain(outer, LOGITS, policy=FP16), "mul") == {"float16": 2}


@pytest.mark.parametrize(("is_written", "casts"), [(False, 2), (True, 3)])
def test_equal_values_share_one_cast(is_written: bool, casts: int) -> None:
    weight = tf.Variable(np.eye(4, dtype="float32"))

    def twice(x: Any) -> Any:
        y = x @ weight
        if is_written:
            weight.assign(2.0 * weight)
        return y + x @ weight

    fast = rewrite(twice, LOGITS, policy=FP16)
    assert sum(op.casts for op in fast.plan.operations if op.name == "matmul") == casts
    assert np.array_equal(fast(LOGITS), LOGITS * (3.0 if is_written else 2.0))


LARGE, TABLE = tf.Variable(tf.fill((4,), 1e5)), tf.constant(10.0 ** -np.arange(0, 12, 3), tf.float32)
CONSTANTS = {
    "a divisor captured": lambda x: (x @ WEIGHT) * TABLE / TABLE,
    "a divisor looked up": lambda x: (x @ WEIGHT) * TABLE / tf.gather(TABLE, tf.argsort(-x)[0] * 0 + tf.range(4)),
    "a variable beyond float16": lambda x: tf.function(lambda y: y * LARGE)(x @ WEIGHT) * 1e-5,
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CONSTANTS)
def test_numbers_of_constants_that_float16_does_not_have(name: str, policy: str) -> None:
    check(lambda x: WAYS * CONSTANTS[name](x), LOGITS, policy=policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_similarity_of_images_whose_window_is_made_inside(policy: str) -> None:
    images = tf.constant(np.random.default_rng(0).integers(100, 156, (2, 1, 16, 16, 1)) / 256, tf.float32)

    def similarity(images: Any) -> Any:
        return tf.image.ssim(tf.reshape(tf.reshape(images[0], (64, 4)) @ WEIGHT, (1, 16, 16, 1)), images[1], 1.0)

    assert relative_error(rewrite(similarity, policy=policy)(images), similarity(images)) < 2.0**-8


@pytest.mark.parametrize("numerator", [1.0, tf.constant(3.0), tf.ones(4)])
def test_a_constant_over_a_value_is_a_reciprocal(numerator: Any) -> None:
    plan = check(lambda x: numerator / (tf.nn.relu(x @ WEIGHT) + 1e-5) * 1e-2, LOGITS, policy=FP16)
    assert planned(plan, "reciprocal")["float32"] >= 1


def test_the_derivative_of_a_quotient_is_as_large_as_a_reciprocal() -> None:
    """It is -x / y / y and not a gradient, so no loss scale brings it into float16's range."""

    def loss(x: Any) -> Any:
        y = x @ WEIGHT
        return tf.tanh(y) / (y * 1e-3) * 1e-3

    plan = check(loss, LOGITS, policy=FP16)
    assert planned(plan, "reciprocal").keys() == {"float32"}


# The user's data.


def added(x: Any, y: Any) -> Any:
    return tf.nn.softmax(x @ WEIGHT + y) * WAYS


def cast(x: Any, y: Any) -> Any:
    return (x @ WEIGHT - tf.cast(y, tf.float32)) * 1e-5


DATA = {
    "a mask": (added, tf.fill((1, 4), -1e9)),
    "integers": (cast, tf.fill((1, 4), 100_000)),
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
        lambda y, ids: tf.gather_nd(y, ids[:, None]),
        lambda y, ids: tf.gather_nd(y, tf.stack([ids, ids], 1))[:, None] * tf.ones(4),
    ],
)
def test_the_gradient_of_a_look_up_is_a_sum(gather: Any, policy: str) -> None:
    ids = tf.zeros(4096, tf.int32)
    check(lambda x: tf.reduce_sum(gather(x @ WEIGHT, ids) @ WAYS[:, None]) * 1e-4, LOGITS, policy=policy)


def test_work_that_is_done_twice_is_counted() -> None:
    step = with_gradient(clipped)
    fast = rewrite(step, LOGITS, LABELS, policy=FP16)
    nodes = nodes_that_run(fast, LOGITS, LABELS)
    again = [node.op for node in nodes if node.name.endswith("/polyamp_float32")]
    assert "Sigmoid" in again
    casts = [node for node in nodes if node.op == "Cast" and "polyamp_cast" in node.name]
    assert fast.plan.totals["casts"] == len(casts)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_gradient_of_a_bias_is_summed_in_float32(policy: str) -> None:
    """Kernels of some devices add up in 16 bits."""
    bias = tf.Variable(tf.zeros(4))

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.bias_add(x @ WEIGHT, bias))
        return tape.gradient(loss, bias)

    assert relative_error(rewrite(step, policy=policy)(tf.ones((4096, 4))), tf.fill((4,), 4096.0)) < 1e-3
