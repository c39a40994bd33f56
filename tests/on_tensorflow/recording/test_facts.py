"""The facts that `polyamp.lint` gets from a TensorFlow function."""

from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

import polyamp
from polyamp.backends.tensorflow import LossScaler, adapter
from polyamp.diagnosis.lint import Facts, UserCast
from support.tensorflow_cases import normal

F16 = polyamp.policy("mixed_float16")
X, W = normal(6, 8), normal(8, 4, seed=1)


def found(target: Any, *args: Any, optimizer: Any = None, policy: Any = F16) -> Facts:
    return adapter.facts(target, args, {}, policy, optimizer)


def sizes(fn: Any, *args: Any) -> list[set[int]]:
    return [set(product.sizes) for product in found(fn, *args).products]


@pytest.mark.parametrize(
    ("product", "expected"),
    [
        (lambda x: x @ W, {6, 4, 8}),
        (lambda x: tf.matmul(x, x, transpose_a=True), {8, 6}),
        (lambda x: tf.matmul(x[None], W[None] + tf.zeros((3, 1, 1))), {6, 4, 8}),
        (lambda x: tf.matmul(x[None], x[None], transpose_b=True), {6, 8}),
        (lambda x: tf.einsum("bqd,dhk->bqhk", x[None], tf.ones((8, 2, 3))), {6, 8}),
        (
            lambda x: tf.nn.conv2d(x[None, :, :, None], tf.ones((3, 3, 1, 5)), 1, "SAME"),
            {1, 5},
        ),
    ],
)
def test_sizes_of_products(product: Any, expected: set[int]) -> None:
    assert sizes(product, X) == [expected]


def test_of_a_step_the_forward_pass_is_looked_at() -> None:
    weight = tf.Variable(W)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, y @ weight @ x[:4]), (0, x))[1]
            )
        return tape.gradient(loss, weight)

    assert sizes(step, X) == [{6, 4, 8}, {6, 8, 4}]


@pytest.mark.parametrize(
    ("loss", "rows"),
    [
        (lambda losses: tf.reduce_mean(losses), 6),
        (lambda losses: tf.reduce_sum(losses) / 6.0, 6),
        (lambda losses: tf.reduce_sum(losses), 1),
    ],
)
def test_losses_over_classes(loss: Any, rows: int) -> None:
    def loss_fn(x: Any) -> Any:
        return loss(tf.nn.sparse_softmax_cross_entropy_with_logits([0] * 6, x))

    assert [(one.classes, one.rows) for one in found(loss_fn, X).losses] == [(8, rows)]


def test_casts_of_the_users_own() -> None:
    layer = keras.layers.Dense(4, dtype="mixed_float16")

    def loss_fn(x: Any) -> Any:
        with tf.name_scope("mine"):
            half = tf.cast(x, tf.float16)
        return tf.cast(tf.reduce_mean(half), tf.float32) + tf.reduce_mean(x @ W), layer(x)

    casts = found(loss_fn, X).casts
    assert [(cast.native, cast.format) for cast in casts] == [("tf.cast", "float16"), ("tf.cast", "float32")]
    assert casts[0].where.startswith(f"mine {Path(__file__).name}:")
    assert isinstance(casts[0], UserCast)


def sgd() -> Any:
    return tf.compat.v1.train.GradientDescentOptimizer(0.1)


OPTIMIZERS = [
    (None, ""),
    (sgd(), "plain"),
    (keras.optimizers.SGD(), "plain"),
    (polyamp.wrap_optimizer(sgd(), F16), "wrapped"),
    (LossScaler(F16), "wrapped"),
    (keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "native scaler"),
    (tf.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer(sgd(), "dynamic"), "native scaler"),
]


@pytest.mark.parametrize(("optimizer", "state"), OPTIMIZERS)
def test_the_state_of_an_optimizer(optimizer: Any, state: str) -> None:
    assert found(lambda x: tf.reduce_mean(x @ W), X, optimizer=optimizer).optimizer == state


def test_a_scaler_in_the_step() -> None:
    weight, scaler = tf.Variable(W), LossScaler(F16)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = scaler.scale(tf.reduce_mean(x @ weight))
        return scaler.step(sgd(), [(tape.gradient(loss, weight), weight)]).applied

    assert found(step, X).optimizer == "wrapped"


def test_variables_in_half_and_their_masters() -> None:
    weight = tf.Variable(tf.cast(W, tf.float16), name="half_weight")

    def loss_fn(x: Any) -> Any:
        return tf.reduce_mean(tf.cast(x, tf.float16) @ weight)

    assert found(loss_fn, X).low_parameters == ("half_weight",)
    assert not found(loss_fn, X, optimizer=sgd()).has_masters
    assert found(loss_fn, X, optimizer=polyamp.wrap_optimizer(sgd(), F16)).has_masters
    assert found(loss_fn, X).products[0].format == "float16"


def test_without_arguments_nothing_is_traced() -> None:
    module = tf.Module()
    module.weight = tf.Variable(tf.cast(W, tf.float16), name="weight")
    known = found(module)
    assert (known.products, known.low_parameters) == ((), ("weight",))
    assert not found(lambda x: x @ W).products
