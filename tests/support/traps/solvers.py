"""Matrices that solvers read: they multiply the roundings of a matrix by its condition."""

from typing import Any

import numpy as np

from support.traps.trap import EYE, eye, in_sixteen_bits, normal, trap

IDENTITY = np.eye(32, dtype=np.float32)
PLANE, SPACE, OUTPUTS = normal(32, 2, seed=11), normal(32, 4, seed=12), normal(32, 2, seed=13)
COMMON = in_sixteen_bits(normal(64, 16, seed=14) + 3 * normal(64, 1, seed=15))
SIGNALS = in_sixteen_bits(COMMON @ normal(16, 2, seed=16) / 4 + normal(64, 2, seed=17) / 8)


@trap("inputs with a common part: their Gram matrix is rounded", EYE, COMMON, SIGNALS)
def ridge_regression(ops: Any, w: Any, x: Any, target: Any) -> Any:
    y = ops.matmul(x, w)
    gram = ops.matmul(ops.swapped(y), y) + 0.1 * ops.array(EYE)
    return ops.solve(gram, ops.matmul(ops.swapped(y), target))


def fitted(ops: Any, kernel: Any, least: float, target: Any) -> Any:
    """Return the predictions of a ridge regression for its own examples: a product reads the kernel's matrix too."""
    return ops.matmul(kernel, ops.solve(kernel + least * ops.array(IDENTITY), target))


@trap("differences of points are rounded", eye(1, 2), PLANE, OUTPUTS)
def kernel_ridge_of_differences(ops: Any, w: Any, x: Any, target: Any) -> Any:
    y = ops.matmul(x, w)
    apart = ops.sum(ops.square(y[:, None] - y[None]), -1)[..., 0]
    return fitted(ops, ops.exp(-0.5 * apart), 0.01, target)


@trap("products of points are rounded, before an exponential", eye(1, 4), SPACE, OUTPUTS)
def kernel_ridge_of_products(ops: Any, w: Any, x: Any, target: Any) -> Any:
    y = ops.matmul(x, w)
    return fitted(ops, ops.exp(0.25 * ops.matmul(y, ops.swapped(y))), 0.1, target)


@trap("products of points are rounded, and a product reads them too", eye(1, 4), SPACE, OUTPUTS, roundings=24)
def kernel_ridge_of_lines(ops: Any, w: Any, x: Any, target: Any) -> Any:
    y = ops.matmul(x, w)
    return fitted(ops, ops.matmul(y, ops.swapped(y)), 2.0, target)
