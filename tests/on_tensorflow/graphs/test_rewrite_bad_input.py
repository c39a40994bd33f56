"""`polyamp.rewrite` of code that it cannot rewrite, the user's own errors, and memory after functions are deleted."""

import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import polyamp
from polyamp.backends.tensorflow import explain, rewrite
from support.tensorflow_cases import EDGES, normal, relative_error, train_step, variables_like

X, W = normal(6, 8), normal(8, 8, seed=1)
WEIGHT = tf.Variable(W)
BF16, FP16 = "mixed_bfloat16", "mixed_float16"


def product(x: Any) -> Any:
    return x @ W


def says(error: pytest.ExceptionInfo[Any], *words: str) -> None:
    """Check that an error has all its parts and these words."""
    for word in (*words, "to do:", "where:"):
        assert re.search(word, str(error.value)), f"{word!r} is not in: {error.value}"


# Steps that cannot be traced.


@pytest.mark.parametrize("run", [rewrite, explain], ids=["rewrite", "explain"])
@pytest.mark.parametrize("step", [lambda x: tf.group(x @ W), lambda x: {"loss": x @ W, "train": [tf.no_op()]}])
def test_a_step_that_returns_an_operation(run: Callable[..., Any], step: Callable[..., Any]) -> None:
    with pytest.raises(polyamp.errors.UsageError, match="returns an operation") as error:
        run(step, X, policy=BF16)
    says(error, "Operation")


def with_a_new_optimizer(x: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(x @ WEIGHT)
    return keras.optimizers.SGD(0.1).apply([tape.gradient(loss, WEIGHT)], [WEIGHT])


@pytest.mark.parametrize("step", [with_a_new_optimizer, lambda x: x @ tf.Variable(W)])
def test_a_step_that_makes_variables_at_each_call(step: Callable[..., Any]) -> None:
    with pytest.raises(polyamp.errors.UsageError, match="new variables") as error:
        rewrite(step, X, policy=BF16)
    says(error, "optimizers once, outside")


def of_a_graph() -> Any:
    with tf.Graph().as_default():
        return tf.constant(1.0, name="stray")


def of_a_function() -> Any:
    kept = []

    @tf.function
    def keep(x: Any) -> Any:
        kept.append(tf.multiply(x, 2.0, name="stray"))
        return x

    keep(X)
    return kept[0]


@pytest.mark.parametrize("make", [of_a_graph, of_a_function])
@pytest.mark.parametrize("run", [rewrite, explain], ids=["rewrite", "explain"])
def test_a_tensor_of_another_graph(run: Callable[..., Any], make: Callable[[], Any]) -> None:
    stray = make()
    with pytest.raises(polyamp.errors.UsageError, match="tensor of another graph") as error:
        run(lambda x: x @ W + stray, X, policy=BF16)
    says(error, "stray", __file__.rpartition("/")[2])


# Steps that were rewritten before.


@pytest.mark.parametrize(
    "outer", [lambda inner: inner, lambda inner: lambda x: inner(x) @ W], ids=["itself", "calls it"]
)
def test_a_step_that_was_rewritten_under_another_policy(outer: Callable[..., Any]) -> None:
    inner = rewrite(product, X, policy=FP16)
    with pytest.raises(polyamp.errors.UsageError, match="rewritten already") as error:
        rewrite(outer(inner), policy=BF16)(X)
    says(error, FP16)
    assert relative_error(inner(X), X @ W) < 2.0**-8


def test_a_step_that_was_rewritten_under_the_same_policy() -> None:
    inner = rewrite(product, policy=BF16)
    outer = rewrite(lambda x: inner(x) @ W, policy=BF16)
    assert relative_error(outer(X), X @ W @ W) < 2.0**-5


def test_a_graph_that_was_rewritten() -> None:
    with tf.Graph().as_default() as graph:
        tf.matmul(X.numpy(), W.numpy())
    ours = rewrite(graph.as_graph_def(), policy=FP16)
    with pytest.raises(polyamp.errors.UsageError, match="rewritten already") as error:
        rewrite(ours, policy=FP16)
    says(error, FP16)


# Gradients through a rewritten function.


@pytest.mark.parametrize("wrap", [lambda step: step, tf.function], ids=["eager", "function"])
def test_a_gradient_through_a_rewritten_function(wrap: Callable[..., Any]) -> None:
    function = rewrite(EDGES["traced before"], policy=BF16)

    def outer(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x, W)
        return tape.gradient(y, x)

    with pytest.raises(polyamp.errors.UnsupportedError, match="gradient") as error:
        wrap(outer)(X)
    says(error, "whole step")


def test_beside_a_tape_that_does_not_record_it() -> None:
    function = rewrite(product, policy=BF16)
    with tf.GradientTape() as tape:
        tape.watch(X)
        with tape.stop_recording():
            y = function(X)
        y = tf.reduce_sum(X * y)
    assert relative_error(tape.gradient(y, X), X @ W) < 2.0**-5


# Policies and objects that are refused.


@pytest.mark.parametrize("compute", ["float8_e4m3fn", "float8_e5m2", "float64", "tensorfloat32"])
@pytest.mark.parametrize("run", [rewrite, explain], ids=["rewrite", "explain"])
def test_formats_that_tensorflow_does_not_compute_in(run: Callable[..., Any], compute: str) -> None:
    with pytest.raises(polyamp.errors.UnsupportedError, match="this format") as error:
        run(product, X, policy=polyamp.policy(compute=compute))
    says(error, compute, "bfloat16")


@pytest.mark.parametrize("run", [rewrite, explain])
@pytest.mark.parametrize("thing", [3, None, "step", X, tf.Graph()], ids=["3", "None", "text", "tensor", "Graph"])
def test_what_is_no_function(run: Callable[..., Any], thing: Any) -> None:
    with pytest.raises(polyamp.errors.InvalidTypeError) as error:
        run(thing, X, policy=BF16)
    says(error, "allowed:")


def test_a_plan_before_the_first_call() -> None:
    with pytest.raises(polyamp.errors.UsageError, match="not traced yet"):
        _ = rewrite(product, policy=BF16).plan


# Errors of the user's own, and code that looks at types.


def test_a_step_that_failed_can_be_called_again() -> None:
    function = rewrite(product, policy=BF16)
    with pytest.raises(ValueError, match="Dimensions"):
        function(tf.ones((2, 3)))
    assert relative_error(function(X), X @ W) < 2.0**-5


def test_an_error_when_it_runs_names_the_node() -> None:
    def step(x: Any) -> Any:
        with tf.name_scope("checked"):
            return tf.debugging.check_numerics(x @ W, "bad value", name="look")

    with pytest.raises(tf.errors.InvalidArgumentError, match=r"(?s)checked/look.*bad value"):
        rewrite(step, policy=BF16)(X * np.nan)


# Nothing leaks, and nothing is deleted too early.

CALLING = ("nested loops", "py_function")


def rewritten_step(name: str) -> Any:
    return rewrite(train_step(EDGES[name], *variables_like(W)), policy=BF16)


@pytest.mark.slow
def test_many_rewrites_leave_nothing_behind() -> None:
    names = ("nested loops", "traced before", "case", "conv")  # in others, plain functions leak too

    def once(turn: int) -> weakref.ref[Any]:
        function = rewritten_step(names[turn % len(names)])
        function(X)
        str(function.plan)
        return weakref.ref(function)

    for turn in range(len(names)):
        once(turn)
    gc.collect()
    functions, objects = set(context.context().list_function_names()), len(gc.get_objects())
    made = [once(turn) for turn in range(2 * len(names))]
    gc.collect()
    assert not [one for one in made if one() is not None]
    assert set(context.context().list_function_names()) == functions
    assert len(gc.get_objects()) - objects < 200  # one rewrite makes thousands of objects


@pytest.mark.parametrize("name", CALLING)
def test_a_function_that_calls_it_outlives_it(name: str) -> None:
    def make() -> Any:
        function = rewritten_step(name)
        return tf.function(lambda x: function(x)[0])

    outer = make()
    gc.collect()
    expected = outer(X)
    concrete = make().get_concrete_function(X)
    del outer
    gc.collect()
    assert np.array_equal(concrete(X), expected)
