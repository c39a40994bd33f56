"""Rewritten training compared with float32: small gradients, and exact updates."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp.backends.tensorflow import LossScaler, rewrite
from support.tensorflow_cases import LOW, POLICIES, normal, planned, relative_error

pytestmark = pytest.mark.slow

FP16, BF16 = "mixed_float16", "mixed_bfloat16"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_by_hand", [True, False])
def test_unscaling_flushes_nothing(is_by_hand: bool, policy: str) -> None:
    """TensorFlow's pass unscales in float16, where a fifth of these gradients is 0."""
    weight, x = tf.Variable(normal(64, 64, seed=1, scale=0.1)), normal(128, 64, scale=1.0)
    scaler = LossScaler(polyamp.LossScale.fixed(2.0**15))

    def step(x: Any, factor: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weight)) * factor
            scaled = loss * 2.0**15 if is_by_hand else scaler.scale(loss)
        grad = tape.gradient(scaled, weight)
        return grad * (1.0 / 2.0**15) if is_by_hand else scaler.unscale([grad])[0][0]

    exact = tf.function(step)(x, 1.0)
    factor = float(8e-8 / np.median(np.abs(exact)))
    exact = tf.function(step)(x, factor).numpy()
    found = rewrite(step, policy=policy)(x, factor).numpy()
    assert np.median(np.abs(exact)) == pytest.approx(8e-8, rel=0.01)
    low = tf.cast(exact * 2.0**15, LOW[policy]).numpy()
    assert np.mean(found == 0) <= np.mean(low == 0)
    assert relative_error(found, exact) < {FP16: 2.0**-9, BF16: 2.0**-6}[policy]


# Updates: bit-identical to those of the same gradients in float32.


class State(tf.Module):
    """An optimizer's state for one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = tf.Variable(normal(16, 16, seed=3))
        self.first, self.second = tf.Variable(tf.zeros((16, 16))), tf.Variable(tf.zeros((16, 16)))
        self.count = tf.Variable(0.0)

    def values(self) -> list[np.ndarray]:
        return [variable.numpy() for variable in (self.weight, self.first, self.second, self.count)]


def adam(state: State, grad: Any) -> None:
    grad = grad * (1.0 / 2.0**15)
    state.count.assign_add(1.0)
    state.first.assign_add(0.1 * (grad - state.first))
    state.second.assign_add(0.001 * (tf.square(grad) - state.second))
    first = state.first / (1.0 - tf.pow(0.9, state.count))
    second = state.second / (1.0 - tf.pow(0.999, state.count))
    state.weight.assign_sub(0.01 * first / (tf.sqrt(second) + 1e-8))


def muon(state: State, grad: Any) -> None:
    """Orthogonalise the momentum by five steps of the Newton-Schulz iteration."""
    state.first.assign(0.95 * state.first + grad / 2.0**15)
    x = state.first / (tf.norm(state.first) + 1e-20)
    for _ in range(5):
        y = tf.matmul(x, x, transpose_b=True)
        x = 3.4445 * x + (-4.775 * y + 2.0315 * (y @ y)) @ x
    state.weight.assign_sub(0.02 * x)


UPDATES = {"adam": adam, "muon": muon}


def gradient_of(weight: Any, x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(weight)
        loss = tf.reduce_mean(tf.square(tf.nn.relu(x @ weight) @ weight)) * 2.0**15 * 1e-6
    return tape.gradient(loss, weight)


def inline(state: State, update: Any) -> Callable[[Any], Any]:
    def step(x: Any) -> Any:
        grad = gradient_of(state.weight, x)
        update(state, grad)
        return grad

    return step


def gradient_in_a_function(state: State, update: Any) -> Callable[[Any], Any]:
    inner = tf.function(lambda x: gradient_of(state.weight, x))

    def step(x: Any) -> Any:
        grad = inner(x)
        update(state, grad)
        return grad

    return step


def update_in_a_function(state: State, update: Any) -> Callable[[Any], Any]:
    inner = tf.function(lambda grad: update(state, grad))

    def step(x: Any) -> Any:
        grad = gradient_of(state.weight, x)
        inner(grad)
        return grad

    return step


def all_in_a_loop(state: State, update: Any) -> Callable[[Any], Any]:
    whole = inline(state, update)
    return lambda x: tf.while_loop(lambda turn, _: turn < 1, lambda turn, _: (turn + 1, whole(x)), (0, state.weight))[1]


def where_finite(state: State, update: Any) -> Callable[[Any], Any]:
    def step(x: Any) -> Any:
        grad = gradient_of(state.weight, x)
        finite = tf.reduce_all(tf.math.is_finite(grad))
        tf.cond(finite, lambda: update(state, grad), lambda: None)
        return grad

    return step


BUILDS = [inline, gradient_in_a_function, update_in_a_function, all_in_a_loop, where_finite]


@pytest.mark.parametrize(
    ("name", "build"),
    [*(("adam", build) for build in BUILDS), ("muon", inline), ("muon", where_finite)],
)
def test_updates_are_exact(name: str, build: Any) -> None:
    ours, plain = State(), State()
    step, update = rewrite(build(ours, UPDATES[name]), policy=FP16), tf.function(UPDATES[name])
    for seed in range(3):
        grad = step(normal(8, 16, seed=seed, scale=1.0))
        assert grad.dtype == tf.float32
        update(plain, grad)
        for found, expected in zip(ours.values(), plain.values(), strict=True):
            np.testing.assert_array_max_ulp(found, expected, 8)  # TensorFlow's own passes may fuse them differently
    assert planned(step.plan)["float16"] == 5
    assert np.any(grad != tf.cast(0.0, tf.float32))


def test_two_optimizers_with_a_gradient_through_the_first_gradient() -> None:
    """A penalty on a gradient's norm: the inner gradient is not an update, because the outer gradient follows it."""
    weight = tf.Variable(normal(16, 16, seed=3))

    def step(x: Any) -> Any:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(tf.tanh(x @ weight))
            loss = y + tf.reduce_mean(tf.square(tf.norm(inner.gradient(y, x), axis=1) - 1.0))
        grad = outer.gradient(loss, weight)
        weight.assign_sub(0.01 * grad)
        return loss, grad

    x = normal(8, 16)
    expected, fast = tf.function(step)(x), rewrite(step, policy=BF16)
    weight.assign(normal(16, 16, seed=3))
    assert max(relative_error(*pair) for pair in zip(fast(x), expected, strict=True)) < 2.0**-5
    assert set(planned(fast.plan)) == {"bfloat16"}


# The gradient of a low value is low, also where full work made it.

IMAGES, KERNEL = normal(4, 6, 6, 8, seed=6), normal(3, 3, 8, 8, seed=7, scale=0.1)
SQUARE, ROWS = normal(16, 16, seed=8, scale=0.2), normal(12, 16, seed=9)
RESIDUAL: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "plain": (lambda x, w: x + tf.nn.relu(x @ w) @ w, ROWS, SQUARE),
    "relu after the sum": (lambda x, w: tf.nn.relu(x + tf.nn.relu(x @ w) @ w), ROWS, SQUARE),
    "dropout": (lambda x, w: x + tf.nn.experimental.stateless_dropout(x @ w, 0.2, seed=(1, 2)), ROWS, SQUARE),
    "reshaped": (lambda x, w: x + tf.reshape(tf.reshape(x, (6, 2, 16)) @ w, (12, 16)), ROWS, SQUARE),
    "gates": (lambda x, w: x + tf.sigmoid(x @ w) * tf.tanh(x @ w), ROWS, SQUARE),
    "convolutions": (lambda x, w: tf.nn.relu(x + tf.nn.conv2d(x, w, 1, "SAME")), IMAGES, KERNEL),
    "pools": (
        lambda x, w: x + tf.nn.max_pool2d(tf.nn.conv2d(x, w, 1, "SAME"), 3, 1, "SAME"),
        IMAGES,
        KERNEL,
    ),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", RESIDUAL)
def test_the_gradient_of_a_residual_stream_is_low(name: str, policy: str) -> None:
    block, x, w = RESIDUAL[name]
    first, weight = tf.Variable(w), tf.Variable(w)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = x @ first if len(x.shape) == 2 else tf.nn.conv2d(x, first, 1, "SAME")
            loss = tf.reduce_mean(tf.square(block(block(y, weight), weight)))
        return tape.gradient(loss, [first, weight])

    rewritten = rewrite(step, x, policy=policy)
    sums = [op.format for op in rewritten.plan.operations if op.native == "AddN"]
    # of each block's input; a product of batches ends its gradient in a sum, which is float32, and so is the first sum
    # of three parts
    assert sums.count(LOW[policy].name) >= 2 - (name in ("reshaped", "gates"))
    for found, exact in zip(rewritten(x), tf.function(step)(x), strict=True):
        assert relative_error(found, exact) < {FP16: 2.0**-7, BF16: 2.0**-4}[policy]


FULL: dict[str, Callable[..., Any]] = {
    "a stream that starts with data": lambda x, w: (lambda y: tf.reduce_mean(tf.square(y + tf.nn.relu(y @ w) @ w)))(
        x + x @ w
    ),
    "full work": lambda x, w: (lambda p: tf.reduce_mean(p @ w) + tf.reduce_sum(tf.sin(p)))(tf.exp(x @ w)),
}


@pytest.mark.parametrize("name", FULL)
def test_the_gradient_of_a_float32_value_is_not(name: str) -> None:
    """Also where a product takes the value: then a part of its gradient is low."""
    weight = tf.Variable(SQUARE)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = FULL[name](x, weight)
        return tape.gradient(loss, weight)

    plan = rewrite(step, ROWS, policy=BF16).plan
    assert [op.format for op in plan.operations if op.native == "AddN"] == ["float32", "as written"]  # of w, too
