"""Random graphs, compared with TensorFlow's own pass: never less careful, and exact within the format's error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from polyamp.backends.tensorflow import rewritten_graph
from polyamp.backends.tensorflow.graphs.parts import is_gradient
from polyamp.backends.tensorflow.operations import OPERATIONS
from support.tensorflow_cases import LOW, POLICIES, PRODUCTS, normal, relative_error, types_of
from support.tensorflow_pass import after_pass

pytestmark = pytest.mark.slow

v1 = tf.compat.v1
SIZE, SEEDS = 8, range(24)
TOLERANCE = {"mixed_float16": 2.0**-6, "mixed_bfloat16": 2.0**-3}  # the error of about a dozen operations in sequence
# The passes never lower these; their deny lists are in core/grappler/optimizers/auto_mixed_precision_lists.h of 2.21.
DENIED = {
    "mixed_bfloat16": {"Exp", "Expm1", "L2Loss", "Pow", "SoftmaxCrossEntropyWithLogits"},
}
LEAVING = PRODUCTS | {"AvgPool", "Erf", "Sigmoid", "Tanh"}  # 16 bits for any input
DENIED["mixed_float16"] = DENIED["mixed_bfloat16"] | {"Mean", "Sum"}


def looped(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return v1.while_loop(lambda i, s: i < 2, lambda i, s: (i + 1, tf.tanh(s @ y) + x), (0, x))[1]


def branched(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return v1.cond(tf.constant(True), lambda: x @ y, lambda: tf.exp(-tf.abs(x)))


def listed(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    array = v1.TensorArray(tf.float32, 2).write(0, x).write(1, y)
    return tf.reduce_mean(array.stack(), 0)


def pooled(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tf.nn.max_pool2d(tf.reshape(x, (1, SIZE, SIZE, 1)), 3, 1, "SAME"), (SIZE, SIZE))


def convolved(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    image = tf.nn.conv2d(tf.reshape(x, (1, SIZE, SIZE, 1)), tf.reshape(y[:3, :3], (3, 3, 1, 1)), 1, "SAME")
    return tf.reshape(image, (SIZE, SIZE))


def halves(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    left, right = tf.split(tf.concat([x, y], 1), 2, 1)
    return left - right


MASK = np.tri(SIZE, dtype=bool)
STEPS: tuple[Callable[[tf.Tensor, tf.Tensor], tf.Tensor], ...] = (
    *(lambda x, y: x @ y,) * 4,
    lambda x, y: tf.einsum("ij,kj->ik", x, y),
    convolved,
    lambda x, y: x + y,
    lambda x, y: x * y,
    lambda x, y: x - 0.5 * y,
    lambda x, y: x / (1.0 + tf.abs(y)),
    lambda x, y: tf.add_n([x, y, x]),
    lambda x, y: tf.exp(-tf.abs(x)),
    lambda x, y: tf.math.log(1.0 + tf.abs(x)),
    lambda x, y: tf.square(tf.tanh(x)),
    lambda x, y: tf.pow(1.0 + tf.abs(tf.tanh(x)), 1.5),
    lambda x, y: tf.math.expm1(tf.tanh(x)),
    lambda x, y: tf.tanh(x),
    lambda x, y: tf.sigmoid(x),
    lambda x, y: tf.nn.relu(x),
    lambda x, y: tf.nn.elu(x),
    lambda x, y: tf.nn.bias_add(x, y[0]),
    lambda x, y: tf.nn.softmax(x),
    lambda x, y: x - tf.reduce_mean(x, 1, keepdims=True),
    lambda x, y: tf.reduce_sum(x, 0, keepdims=True) + y,
    lambda x, y: tf.transpose(x),
    lambda x, y: tf.reshape(tf.transpose(tf.reshape(x, (SIZE, 2, -1)), (1, 0, 2)), (SIZE, SIZE)),
    lambda x, y: tf.where(MASK, x, y),
    lambda x, y: tf.where(MASK, x, -1e9) * 1e-9,
    lambda x, y: tf.math.rsqrt(tf.reduce_mean(tf.square(x), 1, keepdims=True) + 1e-8) * y,
    lambda x, y: tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(tf.stop_gradient(y)), x) * y,
    lambda x, y: tf.clip_by_value(x, -3.0, 3.0),
    halves,
    pooled,
    looped,
    branched,
    listed,
)


def random_graph(seed: int) -> tuple[tf.compat.v1.GraphDef, list[str]]:
    """Return a graph of random operations on square matrices with its gradients, and the nodes to fetch."""
    rng = np.random.default_rng(seed)
    v1.disable_control_flow_v2()  # the runtime does this to loops before TensorFlow's pass sees them
    try:
        with tf.Graph().as_default() as graph:
            placeholders = [v1.placeholder(tf.float32, (SIZE, SIZE), name=name) for name in ("x", "w", "v")]
            values: list[tf.Tensor] = list(placeholders)
            for _ in range(rng.integers(5, 14)):
                x, y = (values[-1 - min(int(rng.geometric(0.4)) - 1, len(values) - 1)] for _ in range(2))
                value = STEPS[rng.integers(len(STEPS))](x, y)
                values.append(value if rng.random() < 0.5 else tf.tanh(value))
            product = values[-1] @ placeholders[1]  # at least one
            loss = tf.reduce_mean(tf.square(tf.tanh(product)), name="loss")
            grads = [grad for grad in v1.gradients(loss, placeholders) if grad is not None]
            fetched = [tf.identity(grad, name=f"grad_{index}").op.name for index, grad in enumerate(grads)]
    finally:
        v1.enable_control_flow_v2()
    return graph.as_graph_def(), ["loss", *fetched]


def run(graph_def: Any, fetches: list[str]) -> list[np.ndarray]:
    feeds = {f"{name}:0": normal(SIZE, SIZE, seed=seed).numpy() for seed, name in enumerate("xwv")}
    with tf.Graph().as_default() as graph, v1.Session() as session:
        tf.graph_util.import_graph_def(graph_def, name="")
        present = {name: value for name, value in feeds.items() if graph.get_operation_by_name(name[:-2])}
        return session.run([f"{name}:0" for name in fetches], present)


def in_16_bits(graph_def: Any, policy: str) -> set[str]:
    """Return the names of nodes that compute in the low format; after a rewrite, a name may belong to a cast."""
    dtype = LOW[policy]
    found = [node for node in graph_def.node if node.attr["T"].type == dtype.as_datatype_enum]
    return {node.name.removesuffix(f"/polyamp_{dtype.name}") for node in found}


def after_denied(graph_def: Any, policy: str) -> Iterator[str]:
    """Return nodes with an input from a denied operation, without a product or a bounded operation in between."""
    nodes = {node.name: node for node in graph_def.node}
    numbers = (node for node in graph_def.node if OPERATIONS.get(node.op) != "shape")
    floats = {node.name for node in numbers if node.attr["T"].type == tf.float32.as_datatype_enum}
    marked = {name for name in floats if nodes[name].op in DENIED[policy]}
    pending = True
    while pending:
        inputs = {name: {text.split(":")[0] for text in nodes[name].input} for name in floats - marked}
        reached = {name for name, made in inputs.items() if made & marked and nodes[name].op not in LEAVING}
        marked, pending = marked | reached, bool(reached)
    return (name for name in marked if nodes[name].op not in DENIED[policy])


@pytest.mark.parametrize("seed", SEEDS)
def test_random_graphs(seed: int) -> None:
    policy = POLICIES[seed % 2]
    graph_def, fetches = random_graph(seed)
    ours = rewritten_graph(graph_def, policy)
    theirs = after_pass(graph_def, fetches, policy.removeprefix("mixed_"))
    low, oracle = in_16_bits(ours, policy), in_16_bits(theirs, policy)
    ops = {node.name: node.op for node in graph_def.node}

    assert not {name for name in low if ops.get(name) in DENIED[policy]}
    # A gradient that a statistic multiplies is low again: the range of gradients is the loss scale's.
    kept = {name for name in after_denied(graph_def, policy) if name not in oracle and not is_gradient(name)}
    assert not {f"{name} ({ops[name]})" for name in kept & low}

    assert types_of(ours.node)[LOW[policy].name] >= types_of(graph_def.node)["float32"] > 0
    for found, other, expected in zip(*(run(graph, fetches) for graph in (ours, theirs, graph_def)), strict=True):
        assert found.dtype == np.float32
        # Some graphs have larger errors than the format: saturated functions, differences of similar numbers.
        assert relative_error(found, expected) < max(TOLERANCE[policy], 1.5 * relative_error(other, expected))


def test_the_graphs_have_every_kind_of_operation() -> None:
    classes = {OPERATIONS.get(node.op) for seed in SEEDS for node in random_graph(seed)[0].node}
    assert {"matmul", "conv", "exp", "softmax", "cross_entropy", "loop_edge", "max_pool", "where", "concat"} <= classes
