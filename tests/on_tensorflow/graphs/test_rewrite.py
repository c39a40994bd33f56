"""`polyamp.rewrite` of TensorFlow functions: which functions, calls, saving, plans and rules."""

import inspect
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp.backends.tensorflow import Rewritten, explain, rewrite
from support.tensorflow_cases import (
    EDGES,
    LOW,
    POLICIES,
    TOLERANCE,
    called_nodes,
    nodes_that_run,
    normal,
    planned,
    relative_error,
    train_step,
    types_of,
    variables_like,
)

v1 = tf.compat.v1
X, W = normal(6, 8), normal(8, 8, seed=1)
BF16 = "mixed_bfloat16"
CLOSE = TOLERANCE[BF16]


def product(x: Any) -> Any:
    return x @ W


def lowered(function: Any, *args: Any) -> dict[str, int]:
    return dict(types_of(nodes_that_run(function, *args)))


# Ways to rewrite, and what can be rewritten.


@polyamp.rewrite(policy=BF16)
def decorated(x: Any) -> Any:
    """A product."""
    return x @ W


@polyamp.rewrite(policy=BF16, backend="tensorflow")
@tf.function
def decorated_function(x: Any) -> Any:
    return x @ W


class Product(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return x @ W


WAYS: dict[str, Callable[[], Any]] = {
    "first call": lambda: polyamp.rewrite(product, policy=BF16),
    "example": lambda: polyamp.rewrite(product, X, policy=BF16),
    "specification": lambda: polyamp.rewrite(product, tf.TensorSpec((None, 8)), policy=BF16, backend="tensorflow"),
    "decorator": lambda: decorated,
    "decorated tf.function": lambda: decorated_function,
    "backend": lambda: rewrite(product, policy=BF16),
    "policy object": lambda: rewrite(product, policy=polyamp.policy(BF16)),
    "tf.function": lambda: polyamp.rewrite(tf.function(product), policy=BF16),
    "ConcreteFunction": lambda: polyamp.rewrite(tf.function(product).get_concrete_function(X), policy=BF16),
    "wrap_function": lambda: rewrite(v1.wrap_function(product, [tf.TensorSpec((6, 8))]), policy=BF16),
    "jit_compile": lambda: polyamp.rewrite(product, policy=BF16, jit_compile=True),
    "Keras model": lambda: rewrite(keras.Sequential([Product()]), policy=BF16),
    "again": lambda: rewrite(rewrite(product, policy=BF16), policy=BF16),
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_rewrite_agree(way: str) -> None:
    function = WAYS[way]()
    found = function(X)
    assert relative_error(found, X @ W) < CLOSE
    assert not np.array_equal(found, X @ W)
    assert found.dtype == tf.float32
    assert function.plan.policy == BF16


def test_a_policy_that_is_not_given_is_the_current_one() -> None:
    with polyamp.policy("mixed_float16"):
        function = rewrite(product)
    with polyamp.policy(BF16):
        function(X)
    assert lowered(function, X) == {"float16": 1}


def test_it_is_a_tf_function_with_the_name_and_signature_of_its_own() -> None:
    def scaled(x: Any, by: float = 2.0, *, and_by: float = 1.0) -> Any:
        """Scaled."""
        return x @ W * by * and_by

    function = rewrite(scaled, policy=BF16)
    assert isinstance(function, Rewritten)
    assert isinstance(function, type(tf.function(scaled)))
    assert (function.__name__, function.__doc__) == ("scaled", "Scaled.")
    assert inspect.signature(function) == inspect.signature(scaled)


def test_options_of_a_tf_function_hold() -> None:
    signature = [tf.TensorSpec((None, 8))]
    function = rewrite(tf.function(product, input_signature=signature, jit_compile=True), policy=BF16)
    for rows in (2, 3):
        assert function(normal(rows, 8)).shape == (rows, 8)
    assert function.experimental_get_tracing_count() == 1
    assert function.get_concrete_function().function_def.attr["_XlaMustCompile"].b
    off = rewrite(tf.function(product, jit_compile=True), policy=BF16, jit_compile=False)
    assert not off.get_concrete_function(X).function_def.attr["_XlaMustCompile"].b


@pytest.mark.parametrize("kind", ["tf.function", "rewrite"])
def test_methods(kind: str) -> None:
    class Model(tf.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.weight = tf.Variable(W * factor)

        @tf.function
        def traced(self, x: Any) -> Any:
            return x @ self.weight

        @polyamp.rewrite(policy=BF16, backend="tensorflow")
        def rewritten(self, x: Any) -> Any:
            return x @ self.weight

    one, two = Model(1.0), Model(2.0)
    for model, factor in ((one, 1.0), (two, 2.0), (one, 1.0)):
        function = rewrite(model.traced, policy=BF16) if kind == "tf.function" else model.rewritten
        assert relative_error(function(X), factor * (X @ W)) < CLOSE
        assert planned(function.plan) == {"bfloat16": 1}


# Arguments and results.


def structured(x: Any, *more: Any, by: float = 2.0, mode: str = "a", given: Any = None, **rest: Any) -> Any:
    y = x @ W * by
    mean = None if given is None else tf.reduce_mean(given["z"])
    return {"y": [y, None, (y, x.shape[0])], "mode": mode, "mean": mean, "more": more, "rest": rest.get("last")}


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((X,), {}),
        ((X,), {"by": 3.0, "mode": "b"}),
        ((X,), {"given": {"z": W}}),
        ((X.numpy(),), {"last": X}),
        ((X, W, X), {"by": tf.constant(3.0)}),
    ],
    ids=["defaults", "values", "nested", "NumPy", "more"],
)
def test_arguments_and_results_are_those_of_a_tf_function(args: Any, kwargs: Any) -> None:
    found, expected = rewrite(structured, policy=BF16)(*args, **kwargs), tf.function(structured)(*args, **kwargs)
    tf.nest.assert_same_structure(found, expected)
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        assert type(one) is type(other)
        if isinstance(one, tf.Tensor) and one.dtype.is_floating:
            assert relative_error(one, other) < CLOSE


def test_variables_that_the_first_call_creates() -> None:
    made: list[tf.Variable] = []

    def step(x: Any) -> Any:
        if not made:
            made.append(tf.Variable(W))
        made[0].assign_add(tf.ones_like(W))
        return x @ made[0]

    function = rewrite(step, policy=BF16)
    for turn in (1.0, 2.0):
        assert relative_error(function(X), X @ (W + turn)) < CLOSE
    assert len(made) == 1
    assert relative_error(made[0], W + 2.0) < 1e-6


def test_while_functions_run_eagerly() -> None:
    function = rewrite(train_step(EDGES["nested loops"], *variables_like(W)), policy=BF16)
    plain = tf.function(train_step(EDGES["nested loops"], *variables_like(W)))
    expected = plain(X)[0]
    tf.config.run_functions_eagerly(True)
    try:
        assert relative_error(function(X)[0], expected) < CLOSE
    finally:
        tf.config.run_functions_eagerly(False)
    assert set(planned(function.plan)) == {"bfloat16"}


def test_threads_that_trace_at_once() -> None:
    function, found = rewrite(EDGES["nested loops"], policy=BF16), {}

    def call(rows: int) -> None:
        found[rows] = function(normal(rows, 8), W)

    threads = [threading.Thread(target=call, args=(rows,)) for rows in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rows, value in found.items():
        assert np.array_equal(value, function(normal(rows, 8), W))
    assert len(found) == 6


def test_it_is_called_in_other_functions() -> None:
    function = rewrite(product, policy=BF16)

    @tf.function
    def outer(x: Any) -> Any:
        return function(x) + function(2.0 * x)

    assert relative_error(outer(X), 3.0 * (X @ W)) < CLOSE
    assert lowered(outer, X) == {"bfloat16": 1}


# Graphs of TensorFlow 1.


def session_step(*, resources: bool, functions: bool) -> tuple[Any, list[str]]:
    """Build a graph with a loop, a condition, gradients and Adam; with or without resource variables and functions."""
    (v1.enable_resource_variables if resources else v1.disable_resource_variables)()
    (v1.enable_control_flow_v2 if functions else v1.disable_control_flow_v2)()
    try:
        with tf.Graph().as_default() as graph:
            weight, x = v1.get_variable("w", initializer=W.numpy()), tf.constant(X.numpy())
            turn = lambda step, state: (step + 1, tf.tanh(state @ weight) @ weight)  # noqa: E731
            state = v1.while_loop(lambda step, state: step < 3, turn, (0, x))[1]
            y = v1.cond(tf.reduce_sum(state) < 1e9, lambda: state @ weight, lambda: state)
            loss = tf.reduce_mean(tf.square(y))
            optimizer = v1.train.AdamOptimizer(1e-2)
            ((grad, _),) = pairs = optimizer.compute_gradients(loss, [weight])
            with tf.control_dependencies([optimizer.apply_gradients(pairs)]):
                fetches = [tf.identity(loss).name, tf.identity(grad).name]
            v1.global_variables_initializer()
    finally:
        v1.enable_resource_variables()
        v1.enable_control_flow_v2()
    return graph.as_graph_def(), fetches


def run_three_steps(graph_def: Any, fetches: list[str]) -> list[Any]:
    with tf.Graph().as_default(), v1.Session() as session:
        tf.graph_util.import_graph_def(graph_def, name="")
        session.run("init")
        return [session.run(fetches) for _ in range(3)]


@pytest.mark.parametrize("functions", [True, False], ids=["functions", "v1 control flow"])
@pytest.mark.parametrize("resources", [True, False], ids=["resources", "references"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_graph_in_a_session(policy: str, resources: bool, functions: bool) -> None:
    graph_def, fetches = session_step(resources=resources, functions=functions)
    before = graph_def.SerializeToString(deterministic=True)
    ours = polyamp.rewrite(graph_def, policy=policy)
    assert graph_def.SerializeToString(deterministic=True) == before
    assert types_of(list(called_nodes(ours))) == {LOW[policy].name: types_of(list(called_nodes(graph_def)))["float32"]}
    assert planned(polyamp.explain(graph_def, policy=policy)) == types_of(list(called_nodes(ours)))
    for found, expected in zip(run_three_steps(ours, fetches), run_three_steps(graph_def, fetches), strict=True):
        assert [one.dtype for one in found] == [np.float32, np.float32]
        assert relative_error(found[0], expected[0]) < TOLERANCE[policy]
        assert relative_error(found[1], expected[1]) < TOLERANCE[policy]


# Saved models.


class Served(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = tf.Variable(W)
        self.infer = rewrite(tf.function(self.loop, input_signature=[tf.TensorSpec((6, 8))]), policy=BF16)

    def loop(self, x: Any) -> Any:
        return EDGES["nested loops"](x, self.weight)

    @polyamp.rewrite(policy=BF16)
    def __call__(self, x: Any) -> Any:
        return EDGES["traced before"](x, self.weight)

    @polyamp.rewrite(policy=BF16)
    def serve(self, x: Any) -> Any:
        return EDGES["conv"](x, self.weight)


def test_a_saved_model_has_rewritten_attributes_and_methods(tmp_path: Path) -> None:
    model = Served()
    expected = {name: getattr(model, name)(X) for name in ("infer", "__call__", "serve")}
    tf.saved_model.save(model, str(tmp_path), signatures=model.infer)
    loaded = tf.saved_model.load(str(tmp_path))
    (served,) = loaded.signatures["serving_default"](X).values()
    assert np.array_equal(served, expected["infer"])
    for name, values in expected.items():
        assert np.array_equal(getattr(loaded, name)(X), values)
    assert set(types_of(nodes_that_run(loaded.signatures["serving_default"]))) == {"bfloat16"}
    loaded.weight.assign(2.0 * W)
    assert not np.array_equal(loaded.infer(X), expected["infer"])


# Plans and rules.


def test_the_plan_of_a_step() -> None:
    step = train_step(EDGES["autograph for"], *variables_like(W))
    function = rewrite(step, X, policy=BF16)
    plan = function.plan
    again = explain(step, X, policy=BF16)
    assert again.totals == plan.totals
    found, expected = ([(op.native, op.format, op.reason) for op in one.operations] for one in (again, plan))
    assert found == expected
    assert json.loads(json.dumps(plan.as_dict())) == plan.as_dict()
    assert sum(plan.totals["by_format"].values()) == len(plan.operations)
    ours = [node for node in nodes_that_run(function, X) if node.op == "Cast" and "polyamp_cast" in node.name]
    assert plan.totals["casts"] == len(ours)
    assert 0 < plan.totals["bytes_cast"] < plan.totals["bytes_moved"]
    assert "bfloat16" in str(plan)


def test_a_plan_counts_bytes() -> None:
    plan = explain(lambda x: tf.exp(x @ W), X, policy=BF16)
    x, w, y = 6 * 8, 8 * 8, 6 * 8
    exp = plan.operations[[op.name for op in plan.operations].index("exp")]
    matmul = plan.operations[[op.name for op in plan.operations].index("matmul")]
    assert (matmul.casts, matmul.bytes_cast) == (2, 4 * (x + w))
    assert matmul.bytes_moved == 2 * (x + w + y) + 4 * (x + w) + 2 * (x + w)
    assert matmul.bytes_moved_float32 == 4 * (x + w + y)
    assert (exp.casts, exp.bytes_cast) == (1, 2 * y)
    assert plan.totals["bytes_moved_float32"] == sum(op.bytes_moved_float32 for op in plan.operations)


def test_a_plan_says_where_and_why() -> None:
    plan = explain(lambda x: tf.exp(tf.nn.relu(x @ W)), X, policy=BF16)
    found = {op.name: (op.format, op.reason) for op in plan.operations}
    assert found["matmul"] == ("bfloat16", "table")
    assert found["relu"] == ("bfloat16", "next to matmul")
    assert found["exp"] == ("float32", "table")
    assert all(Path(__file__).name in op.where for op in plan.operations if op.name in ("matmul", "relu", "exp"))


def test_explaining_changes_and_runs_nothing() -> None:
    weight = tf.Variable(W)
    explain(lambda x: weight.assign_add(tf.transpose(x) @ x), X, policy=BF16)
    assert np.array_equal(weight, W)


@tf.function
def traced_by_itself(x: Any, w: Any) -> Any:
    return x @ w


def in_scopes(x: Any, w: Any) -> Any:
    with tf.name_scope("encoder"):
        x = tf.nn.relu(x @ w)
    with tf.name_scope("decoder"), tf.name_scope("head"):
        x = x @ w
    with tf.name_scope("loop"):
        x = tf.while_loop(lambda step, state: step < 2, lambda step, state: (step + 1, state @ w), (0, x))[1]
    with tf.name_scope("inner"):
        return traced_by_itself(x, w)


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("encoder", 2),  # nobody asks for the gradient of its input
        ("deco*/head", 3),
        ("loop", 3),
        ("inner", 3),
    ],
)
def test_rules_by_scope_and_by_operation_hold_forward_and_backward(pattern: str, count: int) -> None:
    policy = polyamp.policy(BF16, rules={pattern: "full", "square": "full"})
    function = rewrite(train_step(in_scopes, *variables_like(W)), X, policy=policy)
    expected = {"float32": count, "bfloat16": 11 - count}
    assert planned(function.plan) == types_of(nodes_that_run(function, X)) == expected
    reasons = {op.reason for op in function.plan.operations if op.name == "matmul" and op.format == "float32"}
    assert reasons == {f"rule {pattern!r}"}


def test_a_rule_that_matches_nothing_is_reported() -> None:
    policy = polyamp.policy(BF16, rules={"nowhere": "full", "matmul": "lower"})
    with pytest.warns(polyamp.PolyampWarning, match="nowhere"):
        function = rewrite(product, X, policy=policy)
    assert function.plan.unused_rules == ("nowhere",)


def test_a_policy_that_changes_nothing_is_reported_once() -> None:
    function = rewrite(lambda x: tf.exp(x), policy=BF16)
    with pytest.warns(polyamp.PolyampWarning, match=r"changed nothing in <lambda> \(test_rewrite\.py:\d+\)"):
        function(X)
    function(W)
    assert np.array_equal(function(X), tf.exp(X))


def test_float32_changes_nothing_and_says_nothing() -> None:
    step, plain = (train_step(EDGES["conv"], *variables_like(W)) for _ in range(2))
    function = rewrite(step, policy="float32")
    for found, expected in zip(tf.nest.flatten(function(X)), tf.nest.flatten(tf.function(plain)(X)), strict=True):
        assert np.array_equal(found, expected)
    assert function.plan.totals["casts"] == 0
