"""Norms in `polyamp.rewrite`: 16 bits outside and float32 inside, in kernels and written out, forward and backward."""

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import polyamp
from polyamp.backends.tensorflow import explain, rewrite
from support.tensorflow_cases import LOW, POLICIES, nodes_that_run, normal, relative_error

pytestmark = pytest.mark.slow

BF16 = "mixed_bfloat16"
TOLERANCE = {"mixed_float16": 0.01, "mixed_bfloat16": 0.06}
IMAGES, LABELS = normal(32, 12, 12, 3, scale=1.0) + 1.0, tf.constant(np.random.default_rng(1).integers(0, 4, 32))
ROWS = normal(32, 16, scale=1.0)


def branching() -> keras.Model:
    """Apply norms in sequence, in branches that are added, and without scale or offset."""
    inputs = keras.Input((12, 12, 3))
    x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(layers.Conv2D(8, 3, use_bias=False)(inputs)))
    branches = [layers.BatchNormalization()(layers.Conv2D(16, 3, strides=2, use_bias=False)(x)) for _ in range(2)]
    x = layers.Activation("swish")(layers.Add()(branches))
    x = layers.BatchNormalization(scale=False)(layers.Conv2D(8, 1, use_bias=False)(x))
    x = layers.BatchNormalization(center=False)(layers.AveragePooling2D(2)(x))
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling2D()(x)))


def rows() -> keras.Model:
    norms = [layers.LayerNormalization(), layers.BatchNormalization(), layers.GroupNormalization(4)]
    norms += [layers.RMSNormalization()]
    blocks = [layer for norm in norms for layer in (layers.Dense(16, use_bias=False), norm, layers.ReLU())]
    return keras.Sequential([keras.Input((16,)), *blocks, layers.Dense(4)])


def renormalized() -> keras.Model:
    """Apply a norm whose scale is made from its own variance, so that no kernel can compute both."""
    norm = layers.BatchNormalization(renorm=True)
    blocks = [layers.Conv2D(8, 3, use_bias=False), norm, layers.ReLU(), layers.GlobalAveragePooling2D()]
    return keras.Sequential([keras.Input((12, 12, 3)), *blocks, layers.Dense(4)])


def step_of(make: Callable[[], keras.Model]) -> tuple[Callable[..., Any], keras.Model]:
    keras.utils.set_random_seed(0)
    model, loss_of = make(), keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        return loss, tape.gradient(loss, model.trainable_variables)

    return step, model


def state_of(model: keras.Model) -> list[Any]:
    return [variable.numpy() for variable in model.non_trainable_variables if "seed" not in variable.name]


can_renormalize = "renorm" in inspect.signature(layers.BatchNormalization).parameters


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("make", "x"), [(branching, IMAGES), (rows, ROWS), *([(renormalized, IMAGES)] if can_renormalize else [])]
)
def test_gradients_and_statistics_are_those_of_float32(make: Any, x: Any, policy: str) -> None:
    (step, model), (plain, other) = step_of(make), step_of(make)
    fast = rewrite(step, policy=policy)
    for _ in range(2):
        (loss, grads), (expected, exact) = fast(x, LABELS), tf.function(plain)(x, LABELS)
    assert float(loss) == pytest.approx(float(expected), rel=TOLERANCE[policy] / 2)
    for found, right in zip(grads, exact, strict=True):
        distance = np.linalg.norm(np.asarray(found) - np.asarray(right))
        assert distance < 4 * TOLERANCE[policy] * np.linalg.norm(right) + 1e-3
    for found, right in zip(state_of(model), state_of(other), strict=True):
        np.testing.assert_allclose(found, right, atol=TOLERANCE[policy] / 4)


def kernels_of(plan: Any) -> Counter[tuple[str, str]]:
    return Counter((op.native, op.format) for op in plan.operations if op.name == "batch_norm")


@pytest.mark.parametrize("policy", POLICIES)
def test_batch_norms_that_keras_writes_out_run_in_the_kernels(policy: str) -> None:
    step, _ = step_of(branching)
    fast = rewrite(step, IMAGES, LABELS, policy=policy)
    name = LOW[policy].name
    assert kernels_of(fast.plan) == {("FusedBatchNormV3", name): 3, ("FusedBatchNormGradV3", name): 3}
    nodes = [node for node in nodes_that_run(fast, IMAGES, LABELS) if node.op.startswith("FusedBatchNorm")]
    assert {(node.attr["T"].type, node.attr["U"].type) for node in nodes} == {
        (LOW[policy].as_datatype_enum, tf.float32.as_datatype_enum)
    }


def test_a_network_of_batch_norms_moves_little_more_than_half_the_bytes() -> None:
    step, _ = step_of(branching)
    written, totals = (explain(step, IMAGES, LABELS, policy=policy).totals for policy in ("float32", BF16))
    assert totals["bytes_moved"] < 0.6 * totals["bytes_moved_float32"]
    assert totals["bytes_moved_float32"] == pytest.approx(written["bytes_moved_float32"], rel=0.01)  # as it was written


@pytest.mark.parametrize("pattern", ["batch_norm", "batch_normalization*/*"])
def test_a_rule_gives_norms_in_float32(pattern: str) -> None:
    step, _ = step_of(branching)
    plan = explain(step, IMAGES, LABELS, policy=polyamp.policy(BF16, rules={pattern: "full"}))
    assert {format_name for _, format_name in kernels_of(plan)} == {"float32"}
    assert plan.unused_rules == ()


@pytest.mark.parametrize("penalty", [lambda m, v: tf.square(m), lambda m, v: v**2, lambda m, v: m * m + v**2])
def test_a_norm_whose_statistics_have_other_uses_is_right(penalty: Callable[..., Any]) -> None:
    """Its gradient is not that of a batch norm, so the kernel must not replace it."""
    kernel, scale = tf.Variable(normal(3, 3, 3, 8, scale=0.3)), tf.Variable(tf.ones(8))

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = tf.nn.conv2d(x, kernel, 1, "SAME")
            mean, variance = tf.nn.moments(y, (0, 1, 2))
            y = tf.nn.batch_normalization(y, mean, variance, tf.zeros(8), scale, 1e-3)
            loss = tf.reduce_mean(tf.nn.relu(y) ** 3) + tf.reduce_sum(penalty(mean, variance))
        return loss, *tape.gradient(loss, [kernel, scale])

    fast = rewrite(step, policy=BF16)
    for found, expected in zip(fast(IMAGES), tf.function(step)(IMAGES), strict=True):
        assert relative_error(found, expected) < 2.0**-5
    assert kernels_of(fast.plan)["FusedBatchNormGradV3", "bfloat16"] == 0
