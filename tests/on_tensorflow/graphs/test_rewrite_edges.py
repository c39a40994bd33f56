"""`polyamp.rewrite` of steps with control flow, custom derivatives, foreign functions and mixed types."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp.backends.tensorflow import explain
from support.tensorflow_cases import (
    EDGES,
    LOW,
    POLICIES,
    TOLERANCE,
    nodes_that_run,
    normal,
    planned,
    relative_error,
    train_step,
    types_of,
    variables_like,
)

pytestmark = pytest.mark.slow

X, W = normal(6, 8), normal(8, 8, seed=1)
IN_FLOAT32 = {"cholesky": 5, "clip_by_global_norm": 3}  # what a factorization reads, its gradient; two strong values
XLA = ["cond", "nested loops", "TensorArray", "scan", "custom_gradient", "recompute_grad", "assign", "conv"]


def rewritten(step: Any, policy: str, **options: Any) -> Any:
    return polyamp.rewrite(step, policy=policy, backend="tensorflow", **options)


@functools.cache
def in_float32(name: str) -> tuple[Any, Any, Any, int, int]:
    """Return loss, gradient and new weight of a training step in float32, and its products, in the plan and written."""
    (weight,) = variables_like(W)
    plain = tf.function(train_step(EDGES[name], weight))
    loss, (grad,) = plain(X)
    found = planned(explain(plain, X, policy="float32")), types_of(nodes_that_run(plain, X))
    return loss, grad, weight.numpy(), found[0]["float32"], found[1]["float32"]


def assert_as_in_float32(name: str, policy: str, **options: Any) -> Any:
    """Check a training step: values, types, and the number of products in the low format."""
    expected, exact, weight, products, written = in_float32(name)
    (own,) = variables_like(W)
    fast = rewritten(train_step(EDGES[name], own), policy, **options)
    loss, (grad,) = fast(X)
    assert {loss.dtype, grad.dtype, own.dtype} == {tf.float32}
    assert relative_error(loss, expected) < TOLERANCE[policy]
    assert relative_error(grad, exact) < TOLERANCE[policy]
    assert relative_error(own - W, weight - W) < TOLERANCE[policy]
    assert not np.array_equal(grad, exact)
    full = IN_FLOAT32.get(name, 0)
    assert planned(fast.plan) == {LOW[policy].name: products - full} | ({"float32": full} if full else {})
    found = types_of(nodes_that_run(fast, X))
    assert set(found) == {LOW[policy].name} | ({"float32"} if full else set())
    assert found[LOW[policy].name] >= written - full  # a function may be written once for each kind of call
    return fast


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("policy", POLICIES)
def test_edges(name: str, policy: str) -> None:
    assert_as_in_float32(name, policy)


@pytest.mark.parametrize("name", XLA)
def test_under_xla(name: str) -> None:
    """A function that XLA compiles in float32 also compiles when it is rewritten."""
    fast = assert_as_in_float32(name, "mixed_bfloat16", jit_compile=True)
    assert fast.get_concrete_function(X).function_def.attr["_XlaMustCompile"].b


_moved = tf.function(lambda average, y: 0.999 * average + 0.001 * y)
WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "assigned": lambda average, y: average.assign(0.999 * average + 0.001 * y),
    "by a step": lambda average, y: average.assign_sub(0.001 * (average - y)),
    "a row": lambda average, y: average[0].assign(0.999 * average[0] + 0.001 * y[0]),
    "scattered": lambda average, y: average.scatter_nd_update([[0]], [0.999 * average[0] + 0.001 * y[0]]),
    "gathered": lambda average, y: average.scatter_update(
        tf.IndexedSlices(0.999 * tf.gather(average, [0]) + 0.001 * y[:1], [0])
    ),
    "in a function of a variable": lambda average, y: average.assign(_moved(average, y)),
    "in a function": lambda average, y: average.assign(_moved(average.read_value(), y)),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("write", WRITES)
def test_a_moving_average_of_a_product_moves_as_in_float32(write: str, policy: str) -> None:
    """In 16 bits a change of a thousandth is less than half a unit in the last place."""
    average = tf.Variable(tf.ones((6, 8)))

    def step(x: Any) -> Any:
        y = x @ W
        WRITES[write](average, y)
        return y

    fast = rewritten(step, policy)
    for _ in range(20):
        fast(X)
    own = average - 1.0
    average.assign(tf.ones((6, 8)))
    for _ in range(20):
        tf.function(step)(X)
    assert relative_error(own, average - 1.0) < TOLERANCE[policy]


@pytest.mark.parametrize("policy", POLICIES)
def test_operations_without_a_kernel_stay_float32(policy: str) -> None:
    def forward(x: Any) -> Any:
        state = tf.raw_ops.GRUBlockCell(
            x=x @ W, h_prev=tf.zeros((6, 4)), w_ru=normal(12, 8), w_c=normal(12, 4), b_ru=tf.zeros(8), b_c=tf.zeros(4)
        )
        return state.h + tf.math.rint(x @ W)[:, :4]

    fast = rewritten(forward, policy)
    assert np.mean(np.abs(fast(X) - tf.function(forward)(X)) > TOLERANCE[policy]) < 0.1  # some may round differently
    reasons = {op.native: op.reason for op in fast.plan.operations if op.native in ("GRUBlockCell", "Rint")}
    assert reasons == {name: f"no {LOW[policy].name} kernel for {name} on CPU" for name in ("GRUBlockCell", "Rint")}


@functools.cache
def fit(policy: str, *, compiled: bool = False) -> tuple[list[float], Any]:
    """Return the losses of a small model under ``fit``, and its training step."""
    x, y = normal(64, 8).numpy(), np.random.default_rng(0).integers(0, 4, 64)
    keras.utils.set_random_seed(0)
    gelu = keras.layers.Dense(16, activation="gelu")
    model = keras.Sequential([keras.Input((8,)), gelu, keras.layers.BatchNormalization(), keras.layers.Dense(4)])
    optimizer = polyamp.wrap_optimizer(keras.optimizers.Adam(1e-2), policy)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=compiled)
    optimizer.build(model.trainable_variables)
    if policy != "float32":
        model.train_step = rewritten(model.train_step, policy)
    return model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history["loss"], model.train_step


@pytest.mark.parametrize("compiled", [False, True], ids=["", "jit_compile"])
def test_fit_with_a_rewritten_train_step(compiled: bool) -> None:
    found, step = fit("mixed_float16", compiled=compiled)
    assert np.max(np.abs(np.subtract(found, fit("float32")[0]))) < 2e-3
    assert planned(step.plan) == {"float16": 5}


@pytest.mark.parametrize("policy", POLICIES)
def test_types_of_the_users_own_stay(policy: str) -> None:
    def forward(x: Any) -> Any:
        half = tf.cast(x, tf.float16) @ tf.cast(W, tf.float16)
        wide = tf.cast(x, tf.float64) @ tf.cast(W, tf.float64)
        return half, wide, tf.cast(x @ W, tf.complex64), x @ W

    found = rewritten(forward, policy)(X)
    assert [one.dtype for one in found] == [tf.float16, tf.float64, tf.complex64, tf.float32]
    assert np.array_equal(found[0], tf.function(forward)(X)[0])
    assert np.array_equal(found[1], tf.function(forward)(X)[1])


def test_random_numbers_are_the_same() -> None:
    def forward(x: Any) -> Any:
        return tf.nn.dropout(x, 0.5), tf.random.stateless_normal((3,), (1, 2)), x @ W

    def drawn(function: Any) -> Any:
        tf.random.set_seed(1)
        return [value.numpy().tolist() for value in function(X)[:2]]

    assert drawn(rewritten(forward, "mixed_bfloat16")) == drawn(tf.function(forward))


@pytest.mark.parametrize("policy", POLICIES)
def test_effects_happen_once_and_in_order(policy: str, capfd: pytest.CaptureFixture[str]) -> None:
    counter = tf.Variable(0)

    def forward(x: Any) -> Any:
        counter.assign_add(1)
        before = counter.read_value()
        counter.assign(counter * 10)
        tf.print("turn", before)
        tf.debugging.assert_less(x @ W, 1e4)
        return before

    fast = rewritten(forward, policy)
    assert [int(fast(X)), int(fast(X)), int(counter)] == [1, 11, 110]
    assert capfd.readouterr().err.splitlines() == ["turn 1", "turn 11"]


@pytest.mark.parametrize("policy", POLICIES)
def test_ragged_sparse_and_string_arguments(policy: str) -> None:
    def forward(sparse: Any, ragged: Any, text: Any, x: Any) -> Any:
        doubled = tf.ragged.map_flat_values(lambda rows: rows @ x, ragged)
        return tf.sparse.sparse_dense_matmul(sparse, x), doubled, tf.strings.length(text)

    arguments = (tf.sparse.eye(6, 8), tf.RaggedTensor.from_row_lengths(X, [2, 4]), tf.constant("abc"), W)
    found, expected = rewritten(forward, policy)(*arguments), tf.function(forward)(*arguments)
    assert isinstance(found[1], tf.RaggedTensor)
    assert relative_error(found[0], expected[0]) < TOLERANCE[policy]
    assert relative_error(found[1].values, expected[1].values) < TOLERANCE[policy]
    assert int(found[2]) == 3


@pytest.mark.parametrize(("rules", "low"), [({}, 6), ({"enc": "full"}, 0)])
def test_gradients_of_the_users_own_are_backward_like_any_other(rules: dict[str, str], low: int) -> None:
    """They are not part of the update, and they have the scopes of their forward operations."""
    linear = tf.custom_gradient(lambda x, w: (x @ w, lambda dy: (dy @ tf.transpose(w), tf.transpose(x) @ dy)))
    weight = tf.Variable(W)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape, tf.name_scope("enc"):
            loss = tf.reduce_mean(linear(tf.nn.relu(linear(x, weight.value())), weight.value()))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    plan = polyamp.explain(step, X, policy=polyamp.policy("mixed_bfloat16", rules=rules), backend="tensorflow")
    products = [op.format for op in plan.operations if op.native == "MatMul"]
    assert len(products) == 6
    assert products.count("bfloat16") == low
