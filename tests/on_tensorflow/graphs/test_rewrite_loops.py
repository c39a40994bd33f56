"""Loops in `polyamp.rewrite`: 16 bits for carried values that do not add up, and for the lists that loops fill."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers

import polyamp
from polyamp.backends.tensorflow import rewrite
from support.tensorflow_cases import LOW, POLICIES, called_nodes, nodes_that_run, normal, relative_error, types_of

pytestmark = pytest.mark.slow

BF16 = "mixed_bfloat16"
CLOSE = {"mixed_float16": 2.0**-7, "mixed_bfloat16": 2.0**-4}
X = normal(8, 12, 6, seed=7, scale=1.0)
LISTS = ("EmptyTensorList", "TensorListFromTensor", "TensorListReserve")


MODELS: dict[str, Callable[[], list[Any]]] = {
    "LSTM": lambda: [layers.LSTM(16, return_sequences=True), layers.LSTM(16)],
    "GRU": lambda: [layers.GRU(16, return_sequences=True), layers.GRU(16)],
    "SimpleRNN": lambda: [layers.SimpleRNN(16)],
    "both ways": lambda: [layers.Bidirectional(layers.LSTM(8))],
}
# XLA takes longer to compile two layers than everything else here.
COMPILED: dict[str, Callable[[], list[Any]]] = {
    "one LSTM": lambda: [layers.LSTM(16)],
    "one GRU": lambda: [layers.GRU(16)],
}


def step_of(name: str) -> Callable[..., Any]:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((12, 6)), *(MODELS | COMPILED)[name](), layers.Dense(4)])

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        return loss, tape.gradient(loss, [variable.value for variable in model.trainable_variables])

    return step


def lists_of(nodes: Any) -> Counter[str]:
    named = (node for node in nodes if node.op in LISTS)
    kinds = (tf.as_dtype(node.attr["element_dtype"].type) for node in named)
    return Counter(kind.name for kind in kinds if kind.is_floating)


@functools.cache
def in_float32(name: str) -> tuple[Any, list[Any]]:
    return tf.function(step_of(name))(X)


@pytest.mark.parametrize(
    ("name", "policy", "compiled"),
    [*((name, policy, None) for policy in POLICIES for name in MODELS), *((name, BF16, True) for name in COMPILED)],
)
def test_gradients_of_recurrent_layers(name: str, policy: str, compiled: bool | None) -> None:
    fast = rewrite(step_of(name), policy=policy, jit_compile=compiled)
    (loss, grads), (expected, exact) = fast(X), in_float32(name)
    assert set(types_of(nodes_that_run(fast, X))) == {LOW[policy].name}
    assert relative_error(loss, expected) < CLOSE[policy]
    for found, right in zip(grads, exact, strict=True):
        assert relative_error(found, right) < CLOSE[policy]


@pytest.mark.parametrize("policy", POLICIES)
def test_an_lstm_carries_its_output_in_16_bits_and_its_cell_state_in_float32(policy: str) -> None:
    fast, low = rewrite(step_of("LSTM"), X, policy=policy), LOW[policy].as_datatype_enum
    loops = [node for node in nodes_that_run(fast, X) if node.op == "While"]
    assert len(loops) == 2
    for loop in loops:
        floats = Counter(dtype for dtype in loop.attr["T"].list.type if tf.as_dtype(dtype).is_floating)
        assert floats == {low: 1, tf.float32.as_datatype_enum: 1}
    # the cell states of each layer, and a list that nothing uses
    assert lists_of(nodes_that_run(fast, X))["float32"] == 4
    assert lists_of(nodes_that_run(fast, X))[LOW[policy].name] > 20


# Loops by hand.

W = normal(8, 8, seed=1)


def bounded(x: Any) -> Any:
    return tf.while_loop(lambda i, h: i < 5, lambda i, h: (i + 1, tf.tanh(h @ W)), (0, tf.zeros((6, 8)) + x))[1]


def summed(x: Any) -> Any:
    return tf.while_loop(lambda i, s: i < 5, lambda i, s: (i + 1, s + x @ W), (0, tf.zeros((6, 8))))[1]


def scaled(x: Any) -> Any:
    return tf.while_loop(lambda i, s: i < 5, lambda i, s: (i + 1, s * 0.9), (0, x @ W))[1]


def begun_beyond(x: Any) -> Any:
    return tf.while_loop(lambda i, h: i < 5, lambda i, h: (i + 1, tf.tanh(h) @ W + x), (0, tf.fill((6, 8), 1e9)))[1]


def nested(x: Any) -> Any:
    def turn(i: Any, h: Any) -> Any:
        inner = tf.while_loop(lambda j, g: j < 2, lambda j, g: (j + 1, tf.tanh(g @ W)), (0, h))[1]
        return i + 1, inner

    return tf.while_loop(lambda i, h: i < 3, turn, (0, x))[1]


@pytest.mark.parametrize(
    ("forward", "is_low"), [(bounded, True), (nested, True), (summed, False), (scaled, False), (begun_beyond, False)]
)
@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_loop_carries(forward: Any, is_low: bool, policy: str) -> None:
    if forward is begun_beyond and policy == BF16:
        pytest.skip("bfloat16 holds it")
    x = normal(6, 8)
    fast = rewrite(forward, x, policy=policy)
    loops = [node for node in nodes_that_run(fast, x) if node.op in ("While", "StatelessWhile")]
    kinds = {tf.as_dtype(dtype) for loop in loops for dtype in loop.attr["T"].list.type}
    assert (LOW[policy] in kinds) == is_low
    assert relative_error(fast(x), forward(x)) < CLOSE[policy]


# Lists.


def written(x: Any) -> Any:
    array = tf.TensorArray(tf.float32, 6)
    for index in tf.range(6):
        array = array.write(index, tf.tanh(x[index : index + 1] @ W))
    return array.stack()


def mixed(x: Any) -> Any:
    array = tf.TensorArray(tf.float32, 6)
    for index in tf.range(6):
        y = x[index : index + 1] @ W
        array = array.write(index, tf.exp(y) if index > 2 else y)
    return array.stack()


def read_again_and_again(x: Any) -> Any:
    """Read one item in every iteration: its gradient is a sum over all iterations."""
    array = tf.TensorArray(tf.float32, 6).unstack(tf.tanh(x @ W))
    total = tf.zeros(8)
    for _ in tf.range(400):
        total += array.read(1) * 0.01
    return total


def stacked(flow: Any) -> Any:
    return tf.raw_ops.TensorListStack(input_handle=flow, element_shape=[6, 8], element_dtype=tf.float32)


def in_a_branch(x: Any) -> Any:
    array = tf.TensorArray(tf.float32, 2)
    return stacked(tf.cond(tf.reduce_sum(x) < 1e9, lambda: array.write(0, x @ W).flow, lambda: array.write(0, x).flow))


def in_a_function(x: Any) -> Any:
    array = tf.TensorArray(tf.float32, 2).write(0, x @ W).write(1, tf.tanh(x @ W))
    return tf.function(stacked)(array.flow)


def swapped(x: Any) -> Any:
    one, two = (tf.TensorArray(tf.float32, 4, element_shape=(1, 8)).unstack(tf.zeros((4, 1, 8))) for _ in range(2))

    def turn(i: Any, a: Any, b: Any) -> Any:
        return i + 1, b, a.write(i, tf.exp(x[:1] @ W * 0.1))

    _, one, two = tf.while_loop(lambda i, a, b: i < 4, turn, (0, one, two))
    return one.stack() + two.stack()


@pytest.mark.parametrize(
    ("forward", "kinds"),
    [
        (written, {"bfloat16"}),
        (mixed, {"float32"}),
        (read_again_and_again, {"float32"}),
        (in_a_branch, set()),
        (in_a_function, {"bfloat16"}),
        (swapped, {"float32"}),
    ],
)
def test_a_list_holds_what_is_put_into_it(forward: Any, kinds: set[str]) -> None:
    x = tf.Variable(normal(6, 8))

    def step() -> Any:
        with tf.GradientTape() as tape:
            y = forward(tf.convert_to_tensor(x))
        return y, tape.gradient(y, x)

    concrete = tf.function(step).get_concrete_function()
    fast = rewrite(step, policy=BF16)
    for found, expected in zip(fast(), concrete(), strict=True):
        assert relative_error(found, expected) < CLOSE[BF16]
    assert set(lists_of(nodes_that_run(fast))) >= kinds


def test_a_rule_keeps_lists_in_float32() -> None:
    policy = polyamp.policy(BF16, rules={"tensor_list": "full"})
    assert set(lists_of(nodes_that_run(rewrite(step_of("LSTM"), X, policy=policy), X))) == {"float32"}


def test_a_list_in_a_graph_definition() -> None:
    concrete = tf.function(step_of("GRU")).get_concrete_function(X)
    ours = polyamp.rewrite(concrete.graph.as_graph_def(), policy=BF16)
    assert lists_of(called_nodes(ours))["bfloat16"] > 10
