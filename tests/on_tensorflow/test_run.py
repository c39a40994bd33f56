"""`polyamp run` on TensorFlow scripts: losses as in float32, skipped steps, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits

import polyamp
from polyamp.backends.tensorflow.autocast.context import is_everywhere
from polyamp.backends.tensorflow.run import begin
from polyamp.run import Session, running

v1 = tf.compat.v1
PIXELS, DIGITS = load_digits(return_X_y=True)
PIXELS = (PIXELS / 16).astype("float32")
RANDOM = np.random.default_rng(0)
A, B = ((RANDOM.standard_normal(shape) * 0.2).astype("float32") for shape in ((64, 32), (32, 10)))
BATCH = 128


@contextmanager
def started(policy: str | None = "mixed_float16") -> Iterator[Session]:
    with running(Session(None if policy is None else polyamp.policy(policy))) as session:
        begin(session)
        import_module("polyamp.backends.keras.run").begin(session)
        yield session


def loss_of(x: Any, y: Any, a: Any, b: Any) -> tf.Tensor:
    logits = tf.nn.relu(x @ a) @ b
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for start in range(0, 10 * BATCH, BATCH):
        yield PIXELS[start : start + BATCH], DIGITS[start : start + BATCH]


OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "momentum": lambda: keras.optimizers.SGD(0.2, 0.9),
}


def with_a_tape(optimizer: str, mode: str, clip: bool) -> list[float]:
    a, b, opt = tf.Variable(A), tf.Variable(B), OPTIMIZERS[optimizer]()

    def step(x: Any, y: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(x, y, a, b)
        grads = tape.gradient(loss, [a, b])
        if clip:
            grads, _ = tf.clip_by_global_norm(grads, 0.1)
        opt.apply_gradients(zip(grads, [a, b], strict=True))
        return loss

    if mode != "eager":
        step = tf.function(step, jit_compile=mode == "xla")
    return [float(step(tf.constant(x), tf.constant(y))) for x, y in batches()]


def test_nothing_is_turned_on_without_a_policy() -> None:
    with started(None) as session:
        assert not is_everywhere()
        assert hasattr(tf.train.experimental, "enable_mixed_precision_graph_rewrite")
        assert with_a_tape("Adam", "eager", False) == with_a_tape("Adam", "eager", False)
        assert (session.holders, session.interfaces) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize(
    ("optimizer", "mode", "clip"),
    [
        ("Adam", "eager", True),
        ("Adam", "graph", False),
        ("momentum", "graph", True),
        ("momentum", "xla", False),
    ],
)
def test_a_loop_with_a_tape_matches_float32(optimizer: str, mode: str, clip: bool, policy: str) -> None:
    full = with_a_tape(optimizer, mode, clip)
    with started(policy) as session:
        low = with_a_tape(optimizer, mode, clip)
        scales = [holder.loss_scale for holder in session.holders]
        operations = session.operations
    assert {(one.name, one.format) for one in operations} == {("matmul", policy.removeprefix("mixed_"))}
    assert all("test_run.py:" in one.where or mode != "eager" for one in operations)
    assert low != full
    assert low[-1] < 0.95 * low[0]
    np.testing.assert_allclose(low, full, rtol=2e-3 if policy == "mixed_float16" else 2e-2)
    assert scales == ([2.0**16] if policy == "mixed_float16" else [])
    assert with_a_tape(optimizer, mode, clip) == full  # TensorFlow is as it was


def test_an_optimizer_of_tensorflow_1_is_refused_with_the_lines_to_write() -> None:
    with started(), tf.Graph().as_default():
        with pytest.raises(polyamp.errors.UsageError, match=r"polyamp\.wrap_optimizer") as refused:
            v1.train.AdamOptimizer(0.1)
        assert "test_run.py:" in str(refused.value)
    with started("mixed_bfloat16"), tf.Graph().as_default():  # which needs no loss scale
        v1.train.AdamOptimizer(0.1)


def test_small_gradients_survive() -> None:
    def gradient() -> float:
        weight = tf.Variable([[1e-3]])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.constant([[1e-3]]) @ weight) * 2.0**-20
        return float(tape.gradient(loss, weight)[0, 0])

    with started():
        OPTIMIZERS["momentum"]()
        assert gradient() == pytest.approx(1e-3 * 2.0**-20, rel=1e-3)
    with polyamp.autocast("mixed_float16", backend="tensorflow"):
        assert gradient() == 0.0


def test_gradients_of_gradients_and_jacobians_are_true() -> None:
    with started():
        OPTIMIZERS["momentum"]()
        x = tf.Variable([1.0, 2.0])
        with tf.GradientTape(persistent=True) as outer:
            with tf.GradientTape() as inner:
                y = tf.reduce_sum(x**3)
            first = inner.gradient(y, x)
        np.testing.assert_allclose(first, [3.0, 12.0])
        np.testing.assert_allclose(outer.gradient(first, x), [6.0, 12.0])
        np.testing.assert_allclose(outer.jacobian(first, x), np.diag([6.0, 12.0]))
        with tf.GradientTape() as tape:
            y = x * 3.0
        np.testing.assert_allclose(tape.gradient(y, x, tf.constant([1.0, 10.0])), [3.0, 30.0])
        with tf.GradientTape() as tape:
            looked_up = tf.gather(x, [1, 1])
        grad = tape.gradient(looked_up, x)
        assert isinstance(grad, tf.IndexedSlices)
        np.testing.assert_allclose(tf.convert_to_tensor(grad), [0.0, 2.0])


# What is refused, before anything changed.


@pytest.mark.parametrize("compiled", [False, True])
def test_a_gradient_before_any_optimizer_is_refused(compiled: bool) -> None:
    def by_hand(weight: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * weight)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))

    weight = tf.Variable([1.0, 2.0])
    step = tf.function(by_hand) if compiled else by_hand
    with started() as session, pytest.raises(polyamp.errors.UsageError, match="before any optimizer"):
        step(weight)
    assert session.refusal is not None
    np.testing.assert_array_equal(weight, [1.0, 2.0])
    with started("mixed_bfloat16"):  # which needs no loss scale
        by_hand(weight)
    np.testing.assert_allclose(weight, [0.8, 1.6], rtol=1e-6)


def test_replicas_are_refused_before_they_train() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with started(), strategy.scope():
        weight = tf.Variable([1.0])

        def step() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight * weight)
            tape.gradient(loss, weight)

        with pytest.raises(polyamp.errors.UsageError, match="loss scale for replicas"):
            strategy.run(step)
