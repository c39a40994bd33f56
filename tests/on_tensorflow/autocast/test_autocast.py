"""Ambient autocast of TensorFlow: control flow, derivatives, functions traced before, threads, and its reports."""

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp.backends.tensorflow import autocast_context
from polyamp.backends.tensorflow.autocast.lowering import current
from polyamp.errors import UnsupportedError
from support.tensorflow_cases import EDGES, PRODUCTS, normal

FORMATS = {"float16": tf.float16, "bfloat16": tf.bfloat16}
TOLERANCE = {"float16": 2.0**-8, "bfloat16": 2.0**-5}  # of a few products, each rounded to 11 and 8 bits

X, W, V = normal(6, 8), normal(8, 8, seed=1), normal(8, 8, seed=2)
IMAGE, FILTER = normal(2, 9, 9, 3), normal(3, 3, 3, 4, seed=1)
BF16, FP16, FULL = map(polyamp.policy, ("mixed_bfloat16", "mixed_float16", "float32"))


@contextmanager
def under(spec: str | polyamp.Policy, **changes: Any) -> Iterator[None]:
    with autocast_context(polyamp.policy(spec, **changes) if changes else spec):
        yield


def products(function: Any, *args: Any) -> Counter[str]:
    """Return the types of all products in a traced function and in the functions that it calls."""
    traced = function if hasattr(function, "get_concrete_function") else tf.function(function)
    graph = traced.get_concrete_function(*args).graph.as_graph_def()
    nodes = [*graph.node, *(node for one in graph.library.function for node in one.node_def)]
    return Counter(tf.as_dtype(node.attr["T"].type).name for node in nodes if node.op in PRODUCTS)


def rounded(value: tf.Tensor, compute: str) -> bool:
    """Return whether a format holds every element exactly."""
    return bool(tf.reduce_all(tf.cast(tf.cast(value, FORMATS[compute]), value.dtype) == value))


@tf.recompute_grad
def recomputed(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    return tf.tanh(x @ w) @ w


@tf.function
def traced_before(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    return x @ w


traced_before(X, W)
CASES = {name: case for name, case in EDGES.items() if name != "v1 loop"}


def loss_and_grads(function: Callable[..., tf.Tensor], x: tf.Tensor, w: tf.Tensor) -> tuple[tf.Tensor, ...]:
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        y = function(x, w)
        loss = tf.reduce_mean(tf.square(y))
    grads, _ = tf.clip_by_global_norm(tape.gradient(loss, [x, w]), 100.0)
    return (y, *map(tf.convert_to_tensor, grads))


def assert_close(got: Any, expected: Any, tolerance: float) -> None:
    for one, other in zip(tf.nest.flatten(got), tf.nest.flatten(expected), strict=True):
        assert one.dtype == other.dtype == tf.float32
        error = np.abs(one.numpy() - other.numpy()).max()
        assert error <= tolerance * np.abs(other.numpy()).max() + 1e-6


@pytest.mark.parametrize("case", CASES)
def test_edge_cases_match_float32_and_all_their_products_are_low(case: str) -> None:
    def run(x: tf.Tensor, w: tf.Tensor) -> Any:
        return loss_and_grads(CASES[case], x, w)

    expected, traced = run(X, W), tf.function(run)
    with under(BF16):
        results, found = (run(X, W), traced(X, W)), products(traced, X, W)
    for got in results:  # of eager code, and of a graph
        assert_close(got, expected, TOLERANCE["bfloat16"])
        assert any(not np.array_equal(one, other) for one, other in zip(got, expected, strict=True))
    assert found["bfloat16"] >= 2
    assert found["float32"] == (3 if case == "cholesky" else 0)  # its gradient is made of products


@pytest.mark.parametrize("compute", FORMATS)
@pytest.mark.parametrize(
    "product",
    [
        lambda: X @ W,
        lambda: tf.raw_ops.MatMul(a=X, b=W),
        lambda: tf.raw_ops.MatMul(a=X, b=W.numpy().tolist()),
        lambda: tf.linalg.matmul(tf.Variable(X), W.numpy()),
        lambda: tf.einsum("ij,jk->ik", X, W),
        lambda: tf.nn.conv2d(IMAGE, FILTER, 2, "VALID"),
        lambda: tf.matmul(tf.stack([X, X]), W),
        lambda: keras.ops.matmul(X, W),
    ],
)
def test_eager_products_are_rounded_and_come_back_in_float32(product: Callable[[], tf.Tensor], compute: str) -> None:
    assert not rounded(product(), compute)
    with under(f"mixed_{compute}"):
        low = product()
    assert low.dtype == tf.float32
    assert rounded(low, compute)
    assert not rounded(product(), compute)


@pytest.mark.parametrize("dtype", [tf.float64, tf.float16, tf.bfloat16, tf.complex64, tf.int32])
def test_inputs_of_other_types_stay_as_they_were_written(dtype: tf.DType) -> None:
    x = tf.cast(X * 10, dtype)
    with under(FP16 if dtype == tf.bfloat16 else BF16):
        product = tf.matmul(x, x, transpose_b=True)
        X @ W
    assert product.dtype == dtype
    assert np.array_equal(product, tf.matmul(x, x, transpose_b=True))


def test_wrong_arguments_are_refused_in_tensorflows_words() -> None:
    with under(BF16):
        X @ W
        with pytest.raises(tf.errors.InvalidArgumentError, match="Matrix size-incompatible"):
            X @ X
        with pytest.raises(TypeError, match="keyword args"):
            tf.raw_ops.MatMul(X, W)
        with pytest.raises(tf.errors.InvalidArgumentError, match="float"):
            X @ tf.cast(W, tf.float64)


RULES: list[tuple[dict[str, str], list[str]]] = [
    ({}, ["bfloat16", "bfloat16", "float32"]),
    ({"matmul": "full"}, ["float32", "float32", "float32"]),
    ({"dense_1": "full"}, ["bfloat16", "float32", "float32"]),
    ({"model/dense_*": "follow"}, ["bfloat16", "float32", "float32"]),
    ({"dense_1": "full", "softmax": "lower"}, ["bfloat16", "float32", "bfloat16"]),
    ({"model": "lower"}, ["bfloat16", "bfloat16", "bfloat16"]),
]


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(("rules", "expected"), RULES)
def test_rules_by_operation_and_scope(rules: dict[str, str], expected: list[str], graph: bool) -> None:
    def model(x: tf.Tensor) -> list[tf.Tensor]:
        first = x @ W
        with tf.name_scope("model"):
            with tf.name_scope("dense_1"):
                second = x @ V
            return [first, second, tf.nn.softmax(x)]

    with warnings.catch_warnings(), under(BF16, rules=rules):
        warnings.filterwarnings("ignore", message="autocast to bfloat16 changed nothing")
        got = (tf.function(model) if graph else model)(X)
    assert ["bfloat16" if rounded(one, "bfloat16") else "float32" for one in got] == expected


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("inside", [False, True])
def test_the_backward_pass_has_the_formats_of_the_forward_pass_wherever_it_is_taken(inside: bool, graph: bool) -> None:
    def grads(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([W, V])
            with under(BF16, rules={"head": "full"}):
                low = tf.reduce_sum(x @ W)
                with tf.name_scope("head"):
                    full = tf.reduce_sum((x @ V) * x)
                if inside:
                    return [tape.gradient(low, W), tape.gradient(full, V)]
        return [tape.gradient(low, W), tape.gradient(full, V)]

    low, full = (tf.function(grads) if graph else grads)(X)
    assert rounded(low, "bfloat16")
    assert not rounded(full, "bfloat16")


def test_tf_gradients_follow_the_forward_pass() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (6, 8))
        full = x @ W.numpy()
        with under(BF16):
            low = x @ V.numpy()
            tf.gradients(tf.reduce_sum(full), x)
        tf.gradients(tf.reduce_sum(low), x)
        types = [node.attr["T"].type for node in graph.as_graph_def().node if node.op == "MatMul"]
    assert types == [1, 14, 1, 1, 14, 14]  # float32 is 1, bfloat16 is 14; a product has two gradients


def test_what_is_recomputed_runs_under_the_policy_of_its_forward_call() -> None:
    def grads(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(W)
            with under(BF16):
                low = recomputed(x, W)
            full = recomputed(x, W)
        with under(FP16):
            return tape.gradient([low, full], W), x @ W

    assert products(grads, X) == {"bfloat16": 2 + 2 + 4, "float32": 2 + 2 + 4, "float16": 1}


def test_functions_keep_one_trace_for_each_policy() -> None:
    traces: list[str] = []

    @tf.function
    def inner(x: tf.Tensor) -> tf.Tensor:
        lowering = current()
        traces.append(lowering.compute if lowering else "off")
        return x @ W

    @tf.function
    def outer(x: tf.Tensor) -> tf.Tensor:
        return inner(x)

    full = outer(X)
    for _ in range(2):
        for policy in (BF16, FP16):
            with under(policy):
                assert rounded(outer(X), policy.compute)
        with under(BF16), under(FULL):
            assert np.array_equal(outer(X), full)
        assert np.array_equal(outer(X), full)
        assert not rounded(full, "float16")
    assert traces == ["off", "bfloat16", "float16"]


def test_a_function_is_traced_anew_in_a_scope_that_a_rule_may_be_about() -> None:
    @tf.function
    def function(x: tf.Tensor) -> tf.Tensor:
        return x @ W

    with under(BF16, rules={"head": "full"}):
        low = function(X)
        with tf.name_scope("head"):
            full = function(X)
    assert (rounded(low, "bfloat16"), rounded(full, "bfloat16")) == (True, False)


@pytest.mark.parametrize("enter", [autocast_context, lambda policy: polyamp.autocast(policy, backend="tensorflow")])
def test_entered_inside_a_function_that_autograph_converts(enter: Callable[[polyamp.Policy], Any]) -> None:
    @tf.function
    def function(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with enter(BF16):
            low = x @ W
        return low, x @ W

    low, full = function(X)
    assert (rounded(low, "bfloat16"), rounded(full, "bfloat16")) == (True, False)


def test_nesting_and_exceptions() -> None:
    def seen() -> str:
        lowering = current()
        return lowering.compute if lowering else "off"

    context = polyamp.autocast(BF16, backend="tensorflow")
    with context:
        X @ W
        with context, under(FULL):
            assert seen() == "off"
            with pytest.raises(KeyError), under(FP16):
                {}[seen()]
            assert seen() == "off"
            assert not rounded(X @ W, "bfloat16")
        assert seen() == "bfloat16"
    assert seen() == "off"


def test_threads_do_not_see_each_others() -> None:
    found: dict[str, bool] = {}

    def work(name: str, policy: polyamp.Policy) -> None:
        with under(policy):
            barrier.wait()
            found[name] = rounded(X @ W, "bfloat16")
            barrier.wait()

    barrier = threading.Barrier(3)
    threads = [threading.Thread(target=work, args=pair) for pair in (("low", BF16), ("full", FULL))]
    for thread in threads:
        thread.start()
    barrier.wait()
    found["main"] = rounded(X @ W, "bfloat16")
    barrier.wait()
    for thread in threads:
        thread.join()
    assert found == {"low": True, "full": False, "main": False}


@pytest.mark.parametrize("jit", [False, True])
def test_fit_keeps_float32_weights(jit: bool) -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=jit)
    plain = model.fit(X, X[:, :1], epochs=1, verbose=0).history["loss"]
    with polyamp.autocast("mixed_bfloat16", backend="tensorflow"):
        losses = model.fit(X, X[:, :1], epochs=3, verbose=0).history["loss"]
    assert losses[-1] < plain[0]
    assert {variable.dtype for variable in model.variables if "seed" not in variable.path} >= {"float32"}


def test_tensorfloat32_is_what_tensorflow_multiplies_float32_in_by_itself() -> None:
    with under(FULL, compute="tensorfloat32", output="float32"):
        assert not rounded(X @ W, "bfloat16")
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        with (
            pytest.raises(UnsupportedError, match="tensorfloat32"),
            under(FULL, compute="tensorfloat32"),
        ):
            pass
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(True)


def named(compute: str, name: str) -> polyamp.Policy:
    """Return a policy that no other test uses, so that nothing was lowered under it before."""
    return polyamp.policy(f"mixed_{compute}", rules={f"nothing_{name}": "keep"})


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("no_product", lambda: tf.exp(X)),
        ("foreign", lambda: tf.matmul(tf.cast(X, tf.float64), tf.cast(W, tf.float64))),
        ("concrete", lambda: None),
    ],
)
def test_a_block_that_changes_nothing_says_so_once(name: str, work: Callable[[], Any]) -> None:
    concrete = traced_before.get_concrete_function(X, W)
    policy = named("bfloat16", name)
    run = (lambda: concrete(X, W)) if name == "concrete" else work
    with pytest.warns(polyamp.PolyampWarning, match="changed nothing in TensorFlow: it saw no"), under(policy):
        run()
    with under(policy):
        run()


def test_a_missing_kernel_is_named_where_nothing_else_was_lowered() -> None:
    policy = polyamp.policy("mixed_bfloat16", rules={"matmul": "full", "cholesky": "lower", "no_kernel": "keep"})
    with pytest.warns(polyamp.PolyampWarning, match="no bfloat16 kernel for Cholesky on CPU"), under(policy):
        tf.linalg.cholesky(tf.eye(4))


def test_no_false_alarm_for_functions_traced_in_an_earlier_block() -> None:
    @tf.function
    def function(x: tf.Tensor) -> tf.Tensor:
        return x @ W

    for _ in range(2):
        with under(polyamp.policy("mixed_bfloat16", rules={"conv": "full"})):
            function(X)


def test_no_false_alarm_where_tensorflow_is_not_used_or_the_block_fails() -> None:
    with under(named("bfloat16", "unused")):
        pass
    with pytest.raises(KeyError), under(named("bfloat16", "failed")):
        {}[tf.exp(X).dtype]


def test_a_rule_whose_path_is_nowhere_is_reported() -> None:
    with pytest.warns(polyamp.PolyampWarning, match="'haed' matched nothing"), under(BF16, rules={"haed": "full"}):
        X @ W


def test_the_update_is_left_as_it_is() -> None:
    def update(x: tf.Tensor) -> Any:
        with tf.name_scope("polyamp_update"):
            full = x @ W
        return full, x @ W

    with under(BF16):
        assert products(update, X) == {"float32": 1, "bfloat16": 1}


@pytest.mark.parametrize("layer", ["dense", "dense_1"])
def test_a_layers_path_is_the_one_that_keras_gave_it(layer: str) -> None:
    model = keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(8, name=name) for name in ("dense", "dense_1"))])
    with under(BF16, rules={layer: "full"}):
        graph = tf.function(lambda x: model(x)).get_concrete_function(X).graph
    types = [operation.get_attr("T").name for operation in graph.get_operations() if operation.type == "MatMul"]
    assert types == (["float32", "bfloat16"] if layer == "dense" else ["bfloat16", "float32"])


def test_ragged_tensors_are_left_to_tensorflow() -> None:
    ragged = tf.ragged.constant([[1.0], [-2.0, 3.0]])
    with under(BF16, rules={"relu": "lower", "log": "lower"}):
        X @ W
        assert tf.nn.relu(ragged).to_list() == [[1.0], [0.0, 3.0]]
        assert tf.math.log(ragged).dtype == tf.float32
