"""Products that are multiplications, and integers that become floating values: neither is rounded."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp.backends.tensorflow import rewrite
from support.tensorflow_cases import POLICIES, relative_error

L = 4097
FREQUENCIES = tf.Variable((1e4 ** -(np.arange(8) / 8)).astype(np.float32), trainable=False)
PLANES, W = tf.Variable(tf.fill((2, 8), 0.1)), tf.Variable(tf.eye(8))
X, IDS = tf.ones((L, 8)), tf.range(L)


def floats(ids: Any) -> Any:
    return tf.cast(ids, tf.float32)


MULTIPLIED: dict[str, Callable[[Any], Any]] = {
    "einsum": lambda ids: tf.einsum("i,j->ij", floats(ids), FREQUENCIES),
    "einsum of a range": lambda ids: tf.einsum("i,j->ij", floats(tf.range(L)), FREQUENCIES),
    "einsum over a batch": lambda ids: tf.einsum("bi,bj->bij", floats(ids)[None], FREQUENCIES[None])[0],
    "matmul": lambda ids: floats(ids)[:, None] @ FREQUENCIES[None],
    "matmul of a floating range": lambda ids: tf.range(float(L))[:, None] @ FREQUENCIES[None],
    "matmul of a range of a size": lambda ids: floats(tf.range(tf.shape(ids)[0]))[:, None] @ FREQUENCIES[None],
    "batches": lambda ids: tf.matmul(floats(ids)[None, :, None], FREQUENCIES[None, None])[0],
    "tensordot": lambda ids: tf.tensordot(floats(ids), FREQUENCIES, axes=0),
}
SUMMED: dict[str, Callable[[Any], Any]] = {
    "of an argument": lambda ids: floats(tf.stack([ids, ids // 2], -1)) @ PLANES,
    "of a range": lambda ids: tf.stack([tf.range(float(L)), floats(tf.range(L))], -1) @ PLANES,
    "of a captured tensor": lambda ids: floats(tf.stack([IDS, IDS], -1)) @ PLANES,
}
CASES = [(angles, name) for cases, name in ((MULTIPLIED, "mul"), (SUMMED, "matmul")) for angles in cases.values()]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("angles", "name"), CASES)
def test_positions_times_frequencies_are_not_rounded(angles: Any, name: str, policy: str) -> None:
    sources = [FREQUENCIES, PLANES, W]

    def step(x: Any, ids: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch(FREQUENCIES)
            loss = tf.reduce_mean(tf.sin(angles(ids)) * (x @ W))
        return [loss, *tape.gradient(loss, sources, unconnected_gradients="zero")]

    exact, fast = tf.function(step)(X, IDS), rewrite(step, policy=policy)
    for ours, theirs in zip(fast(X, IDS), exact, strict=True):
        assert relative_error(ours.numpy(), theirs.numpy()) <= 2.0**-5
    product = next(op for op in fast.plan.operations if op.native in ("MatMul", "BatchMatMulV2", "Einsum"))
    assert (product.name, product.format) == (name, "float32")
    assert name == "mul" or product.reason.startswith("integers beyond ")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, ids: (x @ W)[:, :1] @ W[:1], [("matmul", "bfloat16"), ("mul", "bfloat16")]),
        (lambda x, ids: tf.einsum("ij->ji", x @ W), [("matmul", "bfloat16"), ("transpose", "bfloat16")]),
        (lambda x, ids: tf.one_hot(ids, 8) @ W, [("matmul", "bfloat16")]),
        (lambda x, ids: floats(ids > 2)[None] @ x, [("matmul", "bfloat16")]),
        (lambda x, ids: floats(tf.cast(ids, tf.uint8))[None] @ x, [("matmul", "bfloat16")]),
        (lambda x, ids: floats(tf.range(4))[None] @ x, [("matmul", "bfloat16")]),
        (lambda x, ids: floats(ids)[None] @ x, [("matmul", "float32")]),
        (lambda x, ids: (x @ W) / tf.sqrt(floats(tf.shape(x)[0])), [("matmul", "bfloat16"), ("div", "bfloat16")]),
        (
            lambda x, ids: tf.einsum("id,id->i", x @ W, x @ W),
            [("matmul", "bfloat16")] * 2 + [("square", "float32")],
        ),
    ],
)
def test_what_is_decided_of_products(function: Callable[..., Any], expected: list[tuple[str, str]]) -> None:
    plan = polyamp.explain(function, tf.ones((4, 8)), tf.range(4), policy="mixed_bfloat16", backend="tensorflow")
    named = ("MatMul", "BatchMatMulV2", "Einsum", "RealDiv")
    assert [(op.name, op.format) for op in plan.operations if op.native in named] == expected


def test_the_gradient_of_a_product_is_one_though_it_sums_nothing() -> None:
    """With one row, the gradient of the weight is an outer product."""

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.exp(x @ W))
        return tape.gradient(loss, W)

    plan = polyamp.explain(step, tf.ones((1, 8)), policy="mixed_bfloat16", backend="tensorflow")
    assert [(op.name, op.format) for op in plan.operations if op.native == "MatMul"] == [("matmul", "bfloat16")] * 2


# --- squared distances that are written out ---------------------------------------------------------------------------


def squares(a: Any) -> Any:
    return tf.reduce_sum(tf.square(a), -1)


def product(a: Any, b: Any) -> Any:
    return tf.matmul(a, b, transpose_b=True)


DISTANCES: dict[str, Callable[[Any, Any], Any]] = {
    "a2 - 2ab + b2": lambda a, b: squares(a)[:, None] - 2 * product(a, b) + squares(b),
    "(a2 + b2) - 2ab": lambda a, b: tf.reduce_sum(a * a, 1, keepdims=True) + squares(b) - 2 * (a @ tf.transpose(b)),
    "a2 + (b2 - 2ab)": lambda a, b: squares(a)[:, None] + (squares(b) - product(2 * a, b)),
    "-2ab + a2 + b2": lambda a, b: -2 * tf.einsum("id,jd->ij", a, b) + squares(a)[:, None] + tf.reduce_sum(b**2, 1),
    "einsum": lambda a, b: tf.einsum("id,id->i", a, a)[:, None] + tf.einsum("id,id->i", b, b) - 2 * product(a, b),
    "norms": lambda a, b: tf.norm(a, axis=1, keepdims=True) ** 2 + tf.norm(b, axis=1) ** 2 - 2 * product(a, b),
    "of a codebook alone": lambda a, b: squares(b) - 2 * product(a, b),
    "a kernel": lambda a, b: tf.exp((2 * product(a, b) - squares(a)[:, None] - squares(b)) / 5000),
}
RANDOM = np.random.default_rng(0)
ROWS = tf.cast(tf.cast(100 * RANDOM.random((8, 8)), tf.bfloat16), tf.float32)
CODES = tf.Variable(tf.cast(100 * RANDOM.random((16, 8)), tf.float32))


@pytest.mark.parametrize("distance", DISTANCES.values(), ids=list(DISTANCES))
def test_the_product_in_a_distance_is_not_rounded(distance: Any) -> None:
    def step(x: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            found = distance(x @ W, CODES)
            weights = tf.reshape(tf.cos(tf.range(float(found.shape[0] * found.shape[1]))), found.shape)
            loss = tf.reduce_sum(found * weights)
        return [loss, *tape.gradient(loss, [CODES, W])]

    exact = tf.function(step)(ROWS)
    for ours, theirs in zip(rewrite(step, policy="mixed_bfloat16")(ROWS), exact, strict=True):
        assert relative_error(ours, theirs) <= 1e-2


def test_other_products_of_what_is_squared_stay_in_16_bits() -> None:
    def loss(x: Any) -> Any:
        y = x @ W
        return tf.reduce_mean(tf.nn.log_softmax(product(y, CODES))) + 0.1 * tf.reduce_mean(y * y)

    plan = polyamp.explain(loss, ROWS, policy="mixed_bfloat16", backend="tensorflow")
    assert [op.format for op in plan.operations if op.native == "MatMul"] == ["bfloat16"] * 2


@pytest.mark.parametrize("policy", POLICIES)
def test_normal_equations_are_solved_as_in_float32(policy: str) -> None:
    """Rounded to 16 bits they lose their small eigenvalues, and may have no root."""
    random = np.random.default_rng(3)
    basis = np.linalg.qr(random.standard_normal((8, 8)))[0] * np.geomspace(1, 0.1, 8)
    x, y = (tf.cast(tf.cast(numbers, tf.bfloat16), tf.float32) for numbers in (basis, random.random((8, 2))))

    def step(x: Any, y: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            found = tf.linalg.lstsq(x @ W, y @ tf.eye(2))
            loss = tf.reduce_sum(tf.sin(found))
        return [found, *tape.gradient(loss, [x, y])]

    found, exact = rewrite(step, policy=policy)(x, y), tf.function(step)(x, y)
    assert relative_error(found[0], exact[0]) <= 2.0**-12  # the products before it round nothing
    for ours, theirs in zip(found[1:], exact[1:], strict=True):
        assert relative_error(ours, theirs) <= 2.0**-4
