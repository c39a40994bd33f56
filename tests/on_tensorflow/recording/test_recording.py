"""Recordings of one TensorFlow step: what is counted, its format and place, and that nothing changes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import polyamp
from polyamp.backends.tensorflow import LossScaler, adapter
from polyamp.backends.tensorflow.recording.replay import spread_of
from polyamp.diagnosis.recording import ACTIVATION, GRADIENT, PARAMETER, Observation, Recording
from polyamp.diagnosis.spread import SAMPLE, stride
from support.diagnosis_cases import count_values
from support.tensorflow_cases import EDGES, normal, train_step, variables_like

pytestmark = pytest.mark.slow

F16 = polyamp.policy("mixed_float16")
X, W = normal(6, 8), normal(8, 8, seed=1)


CALLING = ("cond", "while_loop", "scan", "traced before", "assign", "embedding", "case", "v1 loop", "silu")
SLOW = ("nested loops", "clip_by_global_norm", "one function for many states", "dynamic TensorArray", "switch_case")


def recorded(step: Any, *args: Any, policy: Any = F16, widened: bool = True, scale: float | None = None) -> Recording:
    return adapter.record(step, args, {}, policy, widened=widened, scale=scale)


def named(recording: Recording, kind: Any, place: str) -> Observation:
    (found,) = (one for one in recording.of_kind(kind) if one.place == place)
    return found


def largest(values: Any) -> float:
    return float(np.max(np.abs(values), initial=0))


# Counting.


NUMBERS = st.floats(width=32) | st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 2.0**-126, np.inf, -np.inf, np.nan])


@given(st.lists(NUMBERS, max_size=9))
def test_counts_are_those_of_the_numbers(numbers: list[float]) -> None:
    array = np.array(numbers, np.float32)
    found, expected = spread_of(array), count_values(array.tolist())
    assert found.mass == pytest.approx(expected.mass, rel=1e-5)
    assert replace(found, mass=expected.mass) == expected


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
def test_other_formats_are_counted_as_float32(dtype: tf.DType) -> None:
    found = spread_of(tf.cast(tf.constant([2.0**-24, 3.0, 0.0]), dtype).numpy())
    assert found == count_values([float(tf.cast(tf.cast(2.0**-24, dtype), tf.float32)), 3.0, 0.0])


def test_of_large_tensors_a_sample_is_counted_but_all_is_looked_at() -> None:
    values = np.full(3 * SAMPLE, 1.0, np.float32)
    values[1], values[2], values[4] = 8.0, np.inf, np.nan
    found = spread_of(values)
    assert found.seen == len(values[:: stride(len(values))]) < found.elements == len(values)
    assert (found.largest, found.inf, found.nan) == (8.0, 1, 1)


# Losses and steps.


@pytest.mark.parametrize(("name", "differentiates"), [(name, name in CALLING) for name in EDGES if name not in SLOW])
def test_gradients_are_those_of_float32(name: str, differentiates: bool) -> None:
    (weight,) = variables = variables_like(W)
    loss_fn = tf.function(lambda x: tf.reduce_mean(tf.square(EDGES[name](x, weight))))
    step = train_step(EDGES[name], weight) if differentiates else loss_fn
    recording = recorded(step, X)
    with tf.GradientTape() as tape:
        loss = loss_fn(X)
    grad = tape.gradient(loss, weight)
    *_, last = recording.observations
    assert recording.loss == pytest.approx(float(loss), rel=1e-5)
    assert last.kind == PARAMETER
    assert last.spread.largest == pytest.approx(
        largest(grad.values if isinstance(grad, tf.IndexedSlices) else grad), rel=1e-4
    )
    assert np.array_equal(variables[0], W)
    assert recording.differentiates == differentiates


@pytest.mark.parametrize("name", ["while_loop", "traced before", "one function for many states"])
def test_the_true_step_is_that_of_rewrite(name: str) -> None:
    (weight,) = variables_like(W)
    step = train_step(EDGES[name], weight)
    recording = recorded(step, X, widened=False)
    loss, (grad,) = polyamp.rewrite(step, policy=F16)(X)
    assert recording.loss == pytest.approx(float(loss), rel=1e-6)
    assert recording.observations[-1].spread.largest == pytest.approx(largest(grad), rel=1e-6)


def mlp() -> tuple[Callable[[Any], Any], list[tf.Variable]]:
    weights = [tf.Variable(normal(8, 8, seed=seed), name=f"weight_{seed}") for seed in range(2)]

    def loss_fn(x: Any) -> Any:
        with tf.name_scope("first"):
            x = tf.nn.relu(x @ weights[0])
        with tf.name_scope("second"):
            x = tf.nn.softmax(tf.matmul(x, weights[1], name="scores"))
        return tf.reduce_mean(tf.square(x))

    return loss_fn, weights


def test_what_is_recorded_of_a_step() -> None:
    loss_fn, _ = mlp()
    found = [(one.kind, one.place, one.format) for one in recorded(loss_fn, X).observations]
    assert found == [
        (ACTIVATION, "first/matmul", "float16"),
        (ACTIVATION, "second/scores/matmul", "float16"),
        (ACTIVATION, "second/softmax", "float32"),
        (ACTIVATION, "square", "float32"),
        (ACTIVATION, "mean", "float32"),
        (ACTIVATION, "mul", "float32"),  # the 2x of a square, which does not grow with the loss scale
        (GRADIENT, "div", "float32"),
        (GRADIENT, "mul", "float32"),
        (GRADIENT, "second/mul", "float32"),
        (GRADIENT, "second/sum", "float32"),
        (GRADIENT, "second/sub", "float32"),
        (GRADIENT, "second/mul", "float16"),  # computed in float32, then rounded for the products
        (GRADIENT, "second/scores/matmul", "float16"),
        (PARAMETER, "weight_0", "float16"),
        (PARAMETER, "weight_1", "float16"),
    ]


def squared_error(size: float, kind: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a step whose backward pass has factors as large as the targets, in one of several forms."""
    first, second = tf.Variable(normal(8, 16) * 0.3), tf.Variable(normal(16, 32, seed=1) * 0.3)
    batch = tf.constant(normal(512, 8, seed=2)), tf.constant(normal(512, 32, seed=3) * size)

    def loss_fn(x: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.square(tf.tanh(x @ first) @ second - y))

    def called(x: Any, y: Any) -> Any:
        return tf.function(loss_fn)(x, y)

    def branched(x: Any, y: Any) -> Any:
        return tf.cond(tf.reduce_sum(x) > -1e9, lambda: loss_fn(x, y), lambda: 0.0)

    def looped(x: Any, y: Any) -> Any:
        total = tf.constant(0.0)
        for _ in tf.range(1):
            total += loss_fn(x, y)
        return total

    def stepped(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_fn(x, y)
        return loss, tape.gradient(loss, [first, second])

    def legacy(x: Any, y: Any) -> Any:
        opt = tf.compat.v1.train.GradientDescentOptimizer(0.1)
        opt.apply_gradients(opt.compute_gradients(lambda: loss_fn(x, y), [first, second]))

    steps = {"plain": loss_fn, "called": called, "branched": branched, "looped": looped, "stepped": stepped}
    return {**steps, "legacy": legacy}[kind], batch


@pytest.mark.parametrize("size", [1.0, 300.0])
@pytest.mark.parametrize("kind", ["plain", "called", "branched", "looped", "stepped", "legacy"])
def test_factors_of_a_gradient_are_no_gradients(kind: str, size: float) -> None:
    step, batch = squared_error(size, kind)
    found = polyamp.probe(step, *batch, policy=F16, margin=0.0)
    assert found.window is not None
    largest = max(one.spread.largest for one in found.bounding)
    assert largest < 1.0 * size  # the factor is 2 * size and more
    assert found.window.high == 2.0 ** np.floor(np.log2(65504 / largest))
    if kind in ("plain", "looped") and size == 1.0:  # the recorder chooses their scale
        verdict = polyamp.diagnose(step, *batch, policy=F16, scale=found.window.high * 2.0**6)
        assert (verdict.kind, verdict.rules) == ("scale", {})


def test_the_gradients_of_a_penalty_are_activations() -> None:
    """Gradients of an inner tape are part of the loss and do not grow with the loss scale."""
    weight, x = tf.Variable(normal(8, 4)), tf.constant(normal(6, 8, seed=1))

    def loss_fn(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            score = tf.reduce_sum(tf.tanh(x @ weight) * 100.0)
        return tf.reduce_mean(tf.square(tape.gradient(score, x))) * 1e-4

    found = polyamp.probe(loss_fn, x, policy=F16)
    assert max(one.spread.largest for one in found.bounding) < 1.0
    assert any(one.spread.largest > 10.0 for one in found.recording.of_kind(ACTIVATION))


def test_places_are_patterns_of_rules() -> None:
    loss_fn, _ = mlp()
    policy = polyamp.policy("mixed_float16", rules={"second/scores/matmul": "full", "first/matmul": "full"})
    formats = {one.place: one.format for one in recorded(loss_fn, X, policy=policy).observations}
    assert formats["first/matmul"] == formats["second/scores/matmul"] == formats["weight_1"] == "float32"


def test_a_loops_body_is_counted_over_all_its_turns() -> None:
    recording = recorded(train_step(EDGES["while_loop"], *variables_like(W)), X)
    product = named(recording, ACTIVATION, "while/matmul")
    assert (product.shape, product.spread.elements) == ((6, 8), 3 * 6 * 8)
    assert {one.where for one in recording.of_kind(GRADIENT) if one.name == "matmul"} == {"while"}


def test_what_is_rounded_is_counted_after_that() -> None:
    weight = tf.Variable(W)
    loss_fn = lambda x: tf.reduce_sum(tf.exp(x @ weight))  # noqa: E731
    real = recorded(loss_fn, X, widened=False, scale=2.0**20)
    assert named(real, GRADIENT, "mul").spread.inf
    wide = recorded(loss_fn, X, scale=2.0**20)
    assert named(wide, GRADIENT, "mul")[:6] == named(real, GRADIENT, "mul")[:6]
    assert named(wide, GRADIENT, "mul").spread.is_finite


# Whole training steps.


def scaled_step() -> tuple[Callable[[Any], Any], list[Any]]:
    loss_fn, weights = mlp()
    scaler = LossScaler("mixed_float16")
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build(weights)

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            scaled = scaler.scale(loss_fn(x))
        return scaler.step(optimizer, zip(tape.gradient(scaled, weights), weights, strict=True)).applied

    return step, [*weights, *scaler.variables, *optimizer.variables]


@pytest.mark.parametrize(("given", "used"), [(None, 2.0**16), (8.0, 8.0)])
def test_the_scale_of_a_step_is_its_scalers(given: float | None, used: float) -> None:
    step, _ = scaled_step()
    recording = recorded(step, X, scale=given)
    assert (recording.scale, recording.differentiates) == (used, True)
    assert recording.loss == pytest.approx(float(mlp()[0](X)), rel=1e-6)
    plain = recorded(mlp()[0], X)
    unscaled = recording.unscaled().observations[-1].spread
    assert unscaled.largest == pytest.approx(plain.observations[-1].spread.largest, rel=1e-5)


@pytest.mark.parametrize("widened", [True, False])
def test_nothing_is_changed(widened: bool) -> None:
    step, state = scaled_step()
    step(X)
    before = [one.numpy() for one in state]
    recorded(step, X, widened=widened)
    assert all(np.array_equal(one.numpy(), old) for one, old in zip(state, before, strict=True))


def test_of_the_update_nothing_is_recorded() -> None:
    step, _ = scaled_step()
    assert not [one for one in recorded(step, X).observations if one.name in ("sqrt", "is_finite")]
    names = [one.name for one in recorded(step, X).of_kind(PARAMETER)]
    assert names == ["weight_0", "weight_1"]


def test_averages_and_generators_are_as_they_were() -> None:
    layers = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    generator = tf.random.Generator.from_seed(1)

    def loss_fn(x: Any) -> Any:
        return tf.reduce_mean(model(x + generator.normal(x.shape), training=True))

    state = [*(variable.value for variable in model.variables), generator.state]
    before = [one.numpy() for one in state]
    first, second = (recorded(loss_fn, X) for _ in range(2))
    assert all(np.array_equal(one.numpy(), old) for one, old in zip(state, before, strict=True))
    assert first.loss == second.loss
    assert not [one for one in first.observations if "random" in one.where]


def test_an_error_of_the_step_passes_through() -> None:
    _, state = scaled_step()
    before = [one.numpy() for one in state]

    def failing(x: Any) -> Any:
        state[0].assign_add(tf.ones_like(state[0]))
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_sum(x) > 1e9, ["too small"])]):
            return tf.reduce_mean(x @ state[0])

    with pytest.raises(tf.errors.InvalidArgumentError, match="too small"):
        recorded(failing, X)
    assert all(np.array_equal(one.numpy(), old) for one, old in zip(state, before, strict=True))


def test_legacy_optimizers_and_sessions_gradients() -> None:
    weight = tf.Variable(W, name="weight")
    optimizer = polyamp.wrap_optimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), F16)

    @tf.function
    def step(x: Any) -> None:
        loss = tf.reduce_mean(tf.square(x @ weight))
        optimizer.apply_gradients(optimizer.compute_gradients(loss, [weight]))

    recording = recorded(step, X)
    assert (recording.scale, recording.differentiates) == (2.0**16, True)
    assert [one.name for one in recording.of_kind(PARAMETER)] == ["weight"]
    assert np.array_equal(weight, W)


@pytest.mark.parametrize("wrap", [lambda step: polyamp.rewrite(step, policy=F16, backend="tensorflow"), tf.function])
def test_functions_in_other_forms(wrap: Callable[[Any], Any]) -> None:
    loss_fn, _ = mlp()
    assert recorded(wrap(loss_fn), X) == recorded(loss_fn, X)


# The user's own 16 bits.


def in_half(x: Any, w: Any) -> Any:
    half = tf.cast(x, tf.float16) @ tf.cast(w, tf.float16)
    for _ in tf.range(2):
        half = half * tf.cast(300.0, tf.float16)
    return tf.cast(half, tf.float32)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_the_users_own_casts_are_widened(policy: str) -> None:
    (weight,) = variables_like(W)
    step = train_step(in_half, weight)
    wide = recorded(step, X * 10, policy=polyamp.policy(policy))
    product = named(wide, ACTIVATION, "matmul")
    assert product.format == "float16"
    assert named(wide, ACTIVATION, "while/mul").spread.largest > 65504
    assert all(one.spread.is_finite for one in wide.observations)
    real = recorded(step, X * 10, policy=polyamp.policy(policy), widened=False)
    assert named(real, ACTIVATION, "while/mul").spread.inf
    expected = np.abs(tf.matmul(tf.cast(X * 10, tf.float32), W)).max()
    assert product.spread.largest == pytest.approx(expected, rel=1e-6)


def test_layers_and_variables_in_half() -> None:
    layer = keras.layers.Dense(4, dtype="float16")
    layer.build((None, 8))

    def loss_fn(x: Any) -> Any:
        return tf.reduce_mean(tf.square(layer(x * 1e5)))

    wide, real = (recorded(loss_fn, X, policy=polyamp.policy("float32"), widened=one) for one in (True, False))
    assert [one.format for one in wide.of_kind(PARAMETER)] == ["float16", "float16"]
    assert all(one.spread.is_finite for one in wide.observations)
    assert not all(one.spread.is_finite for one in real.observations)
    assert layer.kernel.dtype == "float16"


# Refusals.


@pytest.mark.parametrize(
    ("step", "found"),
    [
        (lambda x: x @ W, r"shape \(6, 8\)"),
        (lambda x: tf.size(x), "int32"),
        (lambda x: {"loss": x}, "dict"),
        (3, "needs a function or a graph"),
    ],
)
def test_what_has_no_loss_and_no_gradients_is_refused(step: Any, found: str) -> None:
    with pytest.raises(polyamp.PolyampError, match=found):
        recorded(step, X)
