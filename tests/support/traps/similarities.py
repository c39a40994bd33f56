"""Products of computed values: linear attention, transport, Gram matrices, covariances.

What becomes of such a product is smaller than it, or than the roundings of it.
"""

from typing import Any

import numpy as np

from support.traps.trap import EYE, X, Z, eye, in_sixteen_bits, normal, trap

TOKENS, VALUES = normal(2048, 16, seed=3), normal(2048, 16, seed=4)


def over_rows(ops: Any, reduce: Any, y: Any) -> Any:
    """Reduce the first axis."""
    return ops.swapped(reduce(ops.swapped(y), -1))


@trap("sums over 2,048 tokens are beyond float16, and are divided later", eye(4), TOKENS, VALUES)
def linear_attention(ops: Any, w: Any, x: Any, z: Any) -> Any:
    q, v = ops.relu(ops.matmul(x, w)) + 1.0, ops.matmul(z, w) + 8.0
    total = ops.matmul(q, ops.swapped(over_rows(ops, ops.sum, q)))
    return ops.matmul(q, ops.matmul(ops.swapped(q), v)) / (total + 1e-6)


@trap("sums over 2,048 tokens are beyond float16, and so is one over them", eye(4), TOKENS, VALUES)
def linear_attention_by_reciprocal(ops: Any, w: Any, x: Any, z: Any) -> Any:
    q, v = ops.relu(ops.matmul(x, w)) + 1.0, ops.matmul(z, w) + 8.0
    over = 1.0 / (ops.sum(q * over_rows(ops, ops.sum, q), -1) + 1e-6)
    return ops.matmul(q, ops.matmul(ops.swapped(q), v)) * over


@trap("the sums that divide are a column of the same product", eye(4), TOKENS, VALUES)
def linear_attention_by_a_column(ops: Any, w: Any, x: Any, z: Any) -> Any:
    q, v = ops.relu(ops.matmul(x, w)) + 1.0, ops.matmul(z, w) + 8.0
    sums = ops.matmul(q, ops.matmul(ops.swapped(q), ops.joined(v, ops.array(np.ones((2048, 1), np.float32)))))
    return sums[:, :-1] / (sums[:, -1:] + 1e-6)


@trap("exp(-cost) is 0 in float16, and so are the sums that divide", eye(0.5), X, Z)
def sinkhorn(ops: Any, w: Any, x: Any, z: Any) -> Any:
    apart = ops.matmul(x, w)[:, None] - ops.matmul(z, w)[None]
    kernel = ops.exp(-2.0 * ops.sum(ops.square(apart), -1)[..., 0])
    u = 0.125 / ops.sum(kernel, -1)
    for _ in range(8):
        v = 0.125 / ops.matmul(ops.swapped(kernel), u)
        u = 0.125 / ops.matmul(kernel, v)
    return u * kernel * ops.swapped(v)


@trap("products of probabilities are 0 in float16", EYE, X, Z)
def hidden_markov_model(ops: Any, w: Any, x: Any, z: Any) -> Any:
    moves, seen = ops.softmax(ops.matmul(ops.array(EYE), w) * 2.0), ops.softmax(ops.matmul(z, w) * 3.0)
    p = ops.softmax(ops.matmul(x, w))
    for step in range(8):
        p = ops.matmul(p, moves) * seen[step]
    return ops.log(ops.sum(p, -1))


@trap("a Gram matrix is beyond float16, and its mean is not", eye(32), TOKENS)
def gram_matrix(ops: Any, w: Any, x: Any) -> Any:
    y = ops.relu(ops.matmul(x, w))
    gram = ops.matmul(ops.swapped(y), y) / 2048.0
    return 1024.0 * ops.sum(ops.square(gram / 1024.0 - 0.25 * ops.array(EYE)))


@trap("E[yy'] - E[y]E[y]', of rounded products", EYE, in_sixteen_bits(normal(64, 16, seed=9) + 10))
def covariance_of_means(ops: Any, w: Any, x: Any) -> Any:
    y = ops.matmul(x, w)
    mean = over_rows(ops, ops.mean, y)
    return ops.sum(ops.square(ops.matmul(ops.swapped(y), y) / 64.0 - ops.swapped(mean) * mean))


@trap("products of features over 64 examples are beyond float16", eye(64), normal(64, 16), normal(64, 16, seed=1))
def kernel_alignment(ops: Any, w: Any, x: Any, z: Any) -> Any:
    a, b = (y - over_rows(ops, ops.mean, y) for y in (ops.matmul(x, w), ops.matmul(z, w)))
    ab, aa, bb = (ops.matmul(ops.swapped(one), other) for one, other in ((a, b), (a, a), (b, b)))
    size = ops.sqrt(ops.sum(ops.square(aa)) * ops.sum(ops.square(bb)))
    return 1024.0 * ops.sum(ops.square(ab)) / size


@trap("the mean is subtracted from both of two, and so is that of their gradients", eye(1, 2), normal(64, 2, seed=3))
def norm_of_two(ops: Any, w: Any, x: Any) -> Any:
    y = ops.matmul(x, w) + 1.0
    centred = y - ops.mean(y, -1)
    return centred / ops.sqrt(ops.mean(ops.square(centred), -1) + 1e-3)
