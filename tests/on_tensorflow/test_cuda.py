"""On a GPU: kernels are found for it, and steps train.

tox run -e cuda -- --suite=tensorflow
"""

import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp.backends.tensorflow import (
    LossScaler,
    disable_mixed_precision_graph_rewrite,
    enable_mixed_precision_graph_rewrite,
)

pytestmark = pytest.mark.gpu

X, Y = np.random.default_rng(0).normal(size=(64, 32)).astype("float32"), np.zeros((64, 8), "float32")
SHAPES = [(32, 128), (128, 8)]


def weights() -> list[tf.Variable]:
    generator = np.random.default_rng(1)
    return [tf.Variable(generator.normal(size=shape, scale=0.1).astype("float32")) for shape in SHAPES]


def losses(policy: str, **options: object) -> tuple[list[float], polyamp.Plan]:
    trained, scaler = weights(), LossScaler(policy)
    sgd = tf.compat.v1.train.GradientDescentOptimizer(0.1)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.nn.gelu(x @ trained[0]) @ trained[1] - y))
            scaled = scaler.scale(loss)
        scaler.step(sgd, list(zip(tape.gradient(scaled, trained), trained, strict=True)))
        return loss

    fast = polyamp.rewrite(step, policy=policy, backend="tensorflow", **options)
    return [float(fast(tf.constant(X), tf.constant(Y))) for _ in range(20)], fast.plan


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_rewritten_step_trains_as_in_float32(policy: str, jit_compile: bool) -> None:
    expected, _ = losses("float32")
    found, plan = losses(policy, jit_compile=jit_compile)
    products = {op.format for op in plan.operations if op.name == "matmul"}
    assert products == {policy.removeprefix("mixed_")}
    np.testing.assert_allclose(found, expected, rtol=2e-2)


def test_the_graph_rewrite_of_tensorflow_1_multiplies_in_float16_on_the_gpu() -> None:
    def product() -> np.ndarray:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            left, right = (tf.compat.v1.placeholder(tf.float32, (512, 512)) for _ in range(2))
            value = np.random.default_rng(0).normal(size=(512, 512)).astype("float32")
            return session.run(tf.nn.relu(left @ right @ right), {left: value, right: value})

    full = product()
    enable_mixed_precision_graph_rewrite(tf.compat.v1.train.GradientDescentOptimizer(0.1))
    low = product()
    disable_mixed_precision_graph_rewrite()
    assert not np.array_equal(low, full)
    np.testing.assert_allclose(low, full, atol=1e-2 * np.abs(full).max())
