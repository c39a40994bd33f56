"""TensorFlow's own mixed-precision passes, by name and around calls."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp.backends.tensorflow.graphs.grappler import PASSES, GrapplerRewritten, optimized, switched_on

BF16 = polyamp.policy("mixed_bfloat16")
VARIABLE = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_EMULATE_FP16"
X, W = (tf.constant(np.random.default_rng(seed).standard_normal((8, 8)), tf.float32) for seed in range(2))


def rewrite_settings() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key.startswith(VARIABLE.removesuffix("EMULATE_FP16"))}


def rounded(value: tf.Tensor) -> bool:
    return bool(tf.reduce_all(tf.cast(tf.cast(value, tf.bfloat16), tf.float32) == value))


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    options, environment = tf.config.optimizer.get_experimental_options(), rewrite_settings()
    yield
    assert tf.config.optimizer.get_experimental_options() == options
    assert rewrite_settings() == environment


def graph_def() -> Any:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (4, 8), name="x")
        tf.identity(tf.exp(tf.nn.relu(x @ W.numpy())), name="out")
    return graph.as_graph_def()


def types(graph: Any) -> dict[str, str]:
    return {node.op: tf.as_dtype(node.attr["T"].type).name for node in graph.node if node.attr["T"].type}


@pytest.mark.parametrize(
    ("name", "low"), list(zip(PASSES, ("float16", "float16", "bfloat16"), strict=True)), ids=list(PASSES)
)
def test_a_pass_by_name(name: str, low: str) -> None:
    before = graph_def()
    after = optimized(before, ["out"], name)
    relu = "float32" if name == "auto_mixed_precision" else low  # a build for CPUs has no kernel of it for GPUs
    assert types(after) == {"MatMul": low, "Relu": relu, "Exp": "float32", "Identity": "float32"}
    assert before == graph_def()


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")


@pytest.mark.usefixtures("setting")
def test_the_environment_is_restored() -> None:
    optimized(graph_def(), ["out"], "auto_mixed_precision_cpu")
    assert os.environ[VARIABLE] == "1"
    with pytest.raises(TypeError):
        optimized("no graph", ["out"], "auto_mixed_precision_cpu")
    assert os.environ[VARIABLE] == "1"


def test_functions_are_inlined_on_request() -> None:
    inner = tf.function(lambda x: x @ W)
    concrete = tf.function(lambda x: inner(x) + 1.0).get_concrete_function(X)
    plain, inlined = (
        optimized(concrete.graph.as_graph_def(), ["Identity"], "auto_mixed_precision_onednn_bfloat16", inline=inline)
        for inline in (False, True)
    )
    assert "MatMul" not in types(plain)
    assert types(inlined)["MatMul"] == "bfloat16"


def test_an_unknown_pass_is_refused() -> None:
    with pytest.raises(polyamp.InvalidValueError, match="onednn_bfloat16"):
        optimized(graph_def(), ["out"], "auto_mixed_precision_mkl2")


@tf.function
def shared(x: tf.Tensor) -> tf.Tensor:
    return x @ W


def test_the_pass_is_on_for_the_call_alone() -> None:
    fast = GrapplerRewritten(shared, BF16)
    full = shared(X)
    for _ in range(2):
        assert rounded(fast(X))
        assert np.array_equal(shared(X), full)
    assert not rounded(full)


def test_a_training_step_is_lowered_forward_and_backward() -> None:
    weight = tf.Variable(W)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.softmax(tf.nn.relu(x @ weight) @ weight) * x)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    fast = GrapplerRewritten(step, BF16)
    losses = [float(fast(X)) for _ in range(3)]
    formats = Counter(op.format for op in fast.plan.operations if op.name == "matmul")
    assert formats == {"bfloat16": 5}
    assert losses[2] < losses[0]
    assert weight.dtype == tf.float32


def test_the_plan_counts_what_the_pass_inserted() -> None:
    plan = GrapplerRewritten(lambda x: tf.exp(x @ W), BF16).traced_for((X,), {}).plan
    (matmul,) = (op for op in plan.operations if op.name == "matmul")
    assert matmul.as_dict() == {
        "name": "matmul",
        "native": "MatMul",
        "where": matmul.where,
        "class": "lower",
        "format": "bfloat16",
        "reason": "TensorFlow's pass",
    }
    size = X.shape.num_elements()
    assert (matmul.casts, matmul.bytes_cast) == (2, 2 * size * 4)
    assert matmul.bytes_moved == 3 * size * 2 + 2 * size * (4 + 2)
    assert matmul.bytes_moved_float32 == 3 * size * 4
    assert plan.totals["casts"] == 3
    assert "TensorFlow's pass" in str(plan)


def test_a_cast_that_two_products_share_is_counted_once_and_functions_are_part_of_the_plan() -> None:
    plan = GrapplerRewritten(lambda x: tf.exp(x @ W) + tf.exp(shared(x)), BF16).traced_for((X,), {}).plan
    assert [op.format for op in plan.operations if op.name == "matmul"] == ["bfloat16", "bfloat16"]
    assert plan.totals["casts"] == 4  # casts of the argument, of the constant and of two results


def test_no_plan_before_the_first_call() -> None:
    with pytest.raises(polyamp.UsageError, match="not traced"):
        _ = GrapplerRewritten(shared, BF16).plan


def test_nested_calls_and_errors_leave_the_options_as_they_were() -> None:
    inner = GrapplerRewritten(shared, BF16)

    @tf.py_function(Tout=tf.float32)
    def failing(x: tf.Tensor) -> tf.Tensor:
        assert rounded(inner(x))
        assert tf.config.optimizer.get_experimental_options()["auto_mixed_precision_onednn_bfloat16"]
        raise KeyError

    outer = GrapplerRewritten(lambda x: failing(x @ W), BF16)
    with pytest.raises(tf.errors.UnknownError, match="KeyError"):
        outer(X)
    with pytest.raises(KeyError), switched_on("bfloat16"), switched_on("float32"):
        raise KeyError


def test_an_option_that_was_set_before_stays_set() -> None:
    name = "auto_mixed_precision_onednn_bfloat16"
    with switched_on("bfloat16"):
        assert not rounded(GrapplerRewritten(shared, polyamp.policy("float32"))(X))
        assert tf.config.optimizer.get_experimental_options()[name]
    assert name not in tf.config.optimizer.get_experimental_options()


def test_float32_leaves_the_pass_off() -> None:
    plain = GrapplerRewritten(shared, polyamp.policy("float32"))
    assert np.array_equal(plain(X), shared(X))
    assert "bfloat16" not in plain.plan.totals["by_format"]


def test_concrete_functions() -> None:
    fast = GrapplerRewritten(shared.get_concrete_function(X), BF16)
    assert rounded(fast(X))


@pytest.mark.parametrize(
    ("fn", "policy", "options", "message"),
    [
        (shared, "mixed_float16", {}, "float16 only on GPUs"),
        (shared, polyamp.policy(BF16, rules={"matmul": "full"}), {}, "does not support rules"),
        (shared, BF16, {"jit_compile": True}, "under XLA"),
        (tf.function(lambda x: x, jit_compile=True), BF16, {}, "under XLA"),
        (shared, polyamp.policy(compute="float64", output="float32"), {}, "float64"),
    ],
    ids=["device", "rules", "jit_compile", "jit-compiled", "float64"],
)
def test_what_it_cannot_do_is_refused_at_once(fn: Any, policy: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(polyamp.UnsupportedError, match=message):
        GrapplerRewritten(fn, polyamp.policy(policy), **options)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(polyamp.InvalidTypeError, match="not callable"):
        GrapplerRewritten(graph_def(), BF16)


def test_calls_that_the_pass_would_not_see_are_refused() -> None:
    fast = GrapplerRewritten(shared, BF16)
    with pytest.raises(polyamp.UnsupportedError, match="another function's trace"):
        tf.function(lambda x: fast(x), autograph=False)(X)
    tf.config.run_functions_eagerly(True)
    try:
        with pytest.raises(polyamp.UnsupportedError, match="only on graphs"):
            fast(X)
    finally:
        tf.config.run_functions_eagerly(False)


def test_a_function_without_products_is_reported_once() -> None:
    fast = GrapplerRewritten(tf.function(lambda x: tf.exp(x) + 1.0), BF16)
    with pytest.warns(polyamp.PolyampWarning, match="changed nothing"):
        fast(X)
    fast(X)


def test_calls_from_threads() -> None:
    fast, found = GrapplerRewritten(shared, BF16), list[bool]()
    threads = [threading.Thread(target=lambda: found.append(rounded(fast(X)))) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    assert found == [True, True]
