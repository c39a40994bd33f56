"""Squares, norms and powers: the square of 256 is beyond float16, and that of 2e-4 underflows."""

from typing import Any

import numpy as np

from support.traps.trap import EYE, X, Z, eye, in_sixteen_bits, normal, trap

THOUSANDS = in_sixteen_bits(1000 + 300 * np.clip(normal(8, 16), -2, 2))


@trap("the squares inside the library's norm overflow", eye(512), X)
def l2_norm_of_large(ops: Any, w: Any, x: Any) -> Any:
    y = ops.matmul(x, w)
    return y / ops.at_least(ops.norm(y), 1e-12)


@trap("the squares inside the library's norm are lost", eye(2.0**-10), X)
def l2_norm_of_small(ops: Any, w: Any, x: Any) -> Any:
    y = ops.matmul(x, w)
    return y / ops.at_least(ops.norm(y), 1e-12)


@trap("y * y overflows", eye(512), X)
def l2_norm_by_hand(ops: Any, w: Any, x: Any) -> Any:
    y = ops.matmul(x, w)
    return y / ops.at_least(ops.sqrt(ops.sum(y * y, -1)), 1e-12)


@trap("y * y overflows", eye(512), X)
def rms_norm_by_product(ops: Any, w: Any, x: Any) -> Any:
    y = ops.matmul(x, w)
    return y * ops.rsqrt(ops.mean(y * y, -1) + 1e-8)


@trap("the squares of the differences overflow", eye(512), X)
def layer_norm_by_hand(ops: Any, w: Any, x: Any) -> Any:
    y = ops.matmul(x, w)
    centred = y - ops.mean(y, -1)
    return centred / ops.sqrt(ops.mean(centred * centred, -1) + 1e-5)


@trap("E[y^2] overflows, and its difference to E[y]^2 is rounded", EYE, THOUSANDS)
def variance_by_moments(ops: Any, w: Any, x: Any) -> Any:
    y = ops.matmul(x, w)
    mean = ops.mean(y, -1)
    return ops.sqrt(ops.mean(y * y, -1) - mean * mean)


@trap("the variance itself is beyond float16", EYE, THOUSANDS)
def variance_of_thousands(ops: Any, w: Any, x: Any) -> Any:
    return ops.variance(ops.matmul(x, w)) * 1e-4


@trap("the squares of small differences are lost", eye(2.0**-10), X)
def advantages(ops: Any, w: Any, x: Any) -> Any:
    y = ops.matmul(x, w)
    centred = y - ops.mean(y, -1)
    return centred / (ops.sqrt(ops.mean(centred * centred, -1)) + 1e-8)


@trap("the squares of small values are lost", eye(2.0**-9), X, Z)
def cosine_by_hand(ops: Any, w: Any, x: Any, z: Any) -> Any:
    a, b = ops.matmul(x, w), ops.matmul(z, w)
    a, b = a / ops.sqrt(ops.sum(a * a, -1)), b / ops.sqrt(ops.sum(b * b, -1))
    return ops.sum(a * b, -1)


@trap("differences of 300 have squares beyond float16", eye(256), X, Z)
def pairwise_distances(ops: Any, w: Any, x: Any, z: Any) -> Any:
    apart = ops.matmul(x, w)[:, None] - ops.matmul(z, w)[None]
    return ops.sqrt(ops.sum(apart * apart, -1) + 1e-6)


@trap("errors of 300 have squares beyond float16", eye(512), X, Z)
def squared_error_by_product(ops: Any, w: Any, x: Any, target: Any) -> Any:
    error = ops.matmul(x, w) - target
    return ops.mean(error * error)


@trap("the branch that is not taken overflows, and 0 * inf is in its gradient", eye(512), X)
def huber_by_hand(ops: Any, w: Any, x: Any) -> Any:
    error = ops.matmul(x, w)
    far = ops.abs(error)
    return ops.mean(ops.where(far < 1.0, 0.5 * error * error, far - 0.5))


@trap("a square's derivative, 2 * 40,000, is beyond float16", eye(64), X)
def second_differences(ops: Any, w: Any, x: Any) -> Any:
    y = ops.matmul(x, w)
    return ops.mean(ops.square((y[:, 2:] - 2 * y[:, 1:-1] + y[:, :-2]) / 0.01)) * 1e-8


@trap("300^2 is beyond float16", eye(512), X)
def squared_relu(ops: Any, w: Any, x: Any) -> Any:
    y = ops.relu(ops.matmul(x, w))
    return y * y * 1e-6


@trap("16^4 is beyond float16", eye(16), X)
def fourth_power(ops: Any, w: Any, x: Any) -> Any:
    return ops.matmul(x, w) ** 4 * 1e-6


@trap("y^3 overflows inside a tanh that saturates: inf times 0 in its gradient", eye(32), X)
def gelu_by_hand(ops: Any, w: Any, x: Any) -> Any:
    y = ops.matmul(x, w)
    return 0.5 * y * (1.0 + ops.tanh(0.7978845608 * (y + 0.044715 * y * y * y)))
