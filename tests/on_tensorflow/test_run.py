"""`polyamp run` on TensorFlow scripts: losses as in float32, skipped steps, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
        yield session


def loss_of(x: Any, y: Any, a: Any, b: Any) -> tf.Tensor:
    logits = tf.nn.relu(x @ a) @ b
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for start in range(0, 10 * BATCH, BATCH):
        yield PIXELS[start : start + BATCH], DIGITS[start : start + BATCH]


OPTIMIZERS = {
    "v1 Adam": lambda: v1.train.AdamOptimizer(0.01),
    "v1 momentum": lambda: v1.train.MomentumOptimizer(0.2, 0.9),
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


def in_a_session(optimizer: str, take: Callable[[Any, Any], Any]) -> tuple[list[float], bool, int]:
    """Train, and then on a batch of inf; return the losses, whether that changed nothing, and the step's number."""
    with tf.Graph().as_default():
        x, y = v1.placeholder(tf.float32, (None, 64)), v1.placeholder(tf.int64, (None,))
        variables = [v1.get_variable(name, initializer=value) for name, value in zip("ab", (A, B), strict=True)]
        loss, count = loss_of(x, y, *variables), v1.train.get_or_create_global_step()
        opt = OPTIMIZERS[optimizer]()
        pairs = take(opt, loss)
        train = opt.minimize(loss, count) if pairs is None else opt.apply_gradients(pairs, count)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            losses = [float(session.run([loss, train], {x: one, y: two})[0]) for one, two in batches()]
            before = session.run([*variables, *opt.variables()])
            session.run(train, {x: np.full((BATCH, 64), np.inf), y: DIGITS[:BATCH]})
            after = session.run([*variables, *opt.variables()])
            is_same = all(map(np.array_equal, before, after))
            return losses, is_same, int(session.run(count))


def test_nothing_is_turned_on_without_a_policy() -> None:
    with started(None) as session:
        assert not is_everywhere()
        assert hasattr(tf.train.experimental, "enable_mixed_precision_graph_rewrite")
        assert with_a_tape("v1 Adam", "eager", False) == with_a_tape("v1 Adam", "eager", False)
        assert (session.holders, session.interfaces) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize(
    ("optimizer", "mode", "clip"),
    [
        ("v1 Adam", "eager", True),
        ("v1 Adam", "graph", False),
        ("v1 momentum", "graph", True),
        ("v1 momentum", "xla", False),
    ],
)
def test_a_loop_with_a_tape_matches_float32(optimizer: str, mode: str, clip: bool, policy: str) -> None:
    full = with_a_tape(optimizer, mode, clip)
    with started(policy) as session:
        low = with_a_tape(optimizer, mode, clip)
        scales = [holder.loss_scale for holder in session.holders]
        assert session.has_low
        (operations,) = session.operations.values()
    assert {(one.name, one.format) for one in operations} == {("matmul", policy.removeprefix("mixed_"))}
    assert all("test_run.py:" in one.where or mode != "eager" for one in operations)
    assert low != full
    assert low[-1] < 0.95 * low[0]
    np.testing.assert_allclose(low, full, rtol=2e-3 if policy == "mixed_float16" else 2e-2)
    assert scales == ([2.0**16] if policy == "mixed_float16" else [])
    assert with_a_tape(optimizer, mode, clip) == full  # TensorFlow is as it was


TAKES: dict[str, Callable[[Any, Any], Any]] = {
    "minimize": lambda opt, loss: None,
    "compute_gradients": lambda opt, loss: [
        (tf.clip_by_value(grad, -0.01, 0.01), variable) for grad, variable in opt.compute_gradients(loss)
    ],
    "tf.gradients": lambda opt, loss: list(
        zip(
            tf.clip_by_global_norm(v1.gradients(loss, v1.trainable_variables()), 0.1)[0],
            v1.trainable_variables(),
            strict=True,
        )
    ),
}


@pytest.mark.parametrize("how", list(TAKES))
def test_a_session_matches_float32_and_skips(how: str) -> None:
    full, is_same, count = in_a_session("v1 Adam", TAKES[how])
    assert (is_same, count) == (False, 11)
    with started() as session:
        half, is_same, count = in_a_session("v1 Adam", TAKES[how])
        assert "variable of its graph" in session.notes[0]
    assert (is_same, count) == (True, 10)
    assert half != full
    np.testing.assert_allclose(half, full, rtol=2e-3)


class OwnOptimizer(v1.train.Optimizer):
    """An optimizer as BERT's, whose class has its own ``apply_gradients``."""

    def __init__(self) -> None:
        super().__init__(False, "OwnOptimizer")

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        return tf.group(*[variable.assign_sub(0.1 * grad) for grad, variable in grads_and_vars])


def test_an_optimizer_with_its_own_update_is_skipped_too() -> None:
    with started() as session:
        weight, opt = tf.Variable([1.0, 2.0]), OwnOptimizer()

        @tf.function
        def step(factor: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight * weight * factor)
            grads = [tf.clip_by_value(grad, -1.0, 1.0) for grad in tape.gradient(loss, [weight])]
            opt.apply_gradients(zip(grads, [weight], strict=True))

        step(tf.constant(1.0))
        np.testing.assert_allclose(weight.numpy(), [0.9, 1.9], rtol=1e-6)
        step(tf.constant(np.inf))
        np.testing.assert_allclose(weight.numpy(), [0.9, 1.9], rtol=1e-6)
        scaler = session.holders[-1]
        assert (polyamp.health(scaler).skipped, scaler.loss_scale) == (1, 2.0**15)


def test_small_gradients_survive() -> None:
    def gradient() -> float:
        weight = tf.Variable([[1e-3]])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.constant([[1e-3]]) @ weight) * 2.0**-20
        return float(tape.gradient(loss, weight)[0, 0])

    with started():
        assert gradient() == pytest.approx(1e-3 * 2.0**-20, rel=1e-3)
    with polyamp.autocast("mixed_float16", backend="tensorflow"):
        assert gradient() == 0.0


def test_gradients_of_gradients_and_jacobians_are_true() -> None:
    with started():
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


def by_hand(weight: Any) -> None:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight * weight)
    weight.assign_sub(0.1 * tape.gradient(loss, weight))


@pytest.mark.parametrize("compiled", [False, True])
def test_an_update_by_hand_is_refused(compiled: bool) -> None:
    weight = tf.Variable([1.0, 2.0])
    step = tf.function(by_hand) if compiled else by_hand
    with started() as session, pytest.raises(polyamp.errors.UsageError, match="updates a variable itself"):
        step(weight)
    assert session.refusal is not None
    np.testing.assert_array_equal(weight, [1.0, 2.0])
    with started("mixed_bfloat16"):  # which needs no loss scale
        by_hand(weight)
    np.testing.assert_allclose(weight, [0.8, 1.6], rtol=1e-6)


@pytest.mark.parametrize("use_resource", [True, False])
def test_an_update_by_hand_is_refused_while_the_graph_is_built(use_resource: bool) -> None:
    with started(), tf.Graph().as_default():
        weight = v1.get_variable("w", initializer=A, use_resource=use_resource)
        (grad,) = v1.gradients(tf.reduce_sum(weight * weight), [weight])
        with pytest.raises(polyamp.errors.UsageError, match="updates a variable itself"):
            v1.assign_sub(weight, 0.1 * grad)


def test_assignments_that_are_no_updates_are_allowed() -> None:
    with started():
        weight, copy = tf.Variable([1.0, 2.0]), tf.Variable([0.0, 0.0])
        weight.assign([2.0, 3.0])
        opt = OPTIMIZERS["v1 momentum"]()
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight)
        opt.apply_gradients([(tape.gradient(loss, weight), weight)])
        copy.assign(weight)  # a moving average, a target network
        weight.assign(tf.clip_by_value(weight, -1.0, 1.0))  # a constraint, after the step
        np.testing.assert_allclose(weight, [1.0, 1.0])


def test_mixed_precision_of_its_own_is_refused() -> None:
    half = tf.Variable([1.0], dtype=tf.float16)
    with started():
        with pytest.raises(polyamp.errors.UsageError, match="set_experimental_options"):
            tf.config.optimizer.set_experimental_options({"auto_mixed_precision": True})
        tf.config.optimizer.set_experimental_options({"auto_mixed_precision": False})
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.cast(half, tf.float32))
        with pytest.raises(polyamp.errors.UsageError, match="mixed precision of its own"):
            tape.gradient(loss, half)
        with pytest.raises(polyamp.errors.UsageError, match="mixed precision of its own"):
            polyamp.wrap_optimizer(OPTIMIZERS["v1 Adam"](), "mixed_float16")
    assert not tf.config.optimizer.get_experimental_options().get("auto_mixed_precision")


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


def test_keras_layers_run_in_16_bits_too() -> None:
    with started():
        layer = keras.layers.Dense(4)
        result = layer(PIXELS[:2])
        np.testing.assert_array_equal(result, tf.cast(tf.cast(result, tf.float16), tf.float32))
        assert layer.kernel.dtype == "float32"
