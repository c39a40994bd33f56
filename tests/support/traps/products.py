"""Products that are multiplications, products of integers, and products in distances that are written out."""

from typing import Any

import numpy as np

from support.traps.trap import EYE, X, Z, in_sixteen_bits, normal, trap

FREQUENCIES = in_sixteen_bits(1e4 ** -(np.arange(16) / 16))
PLANES = in_sixteen_bits(np.random.default_rng(4).standard_normal((2, 16)))
ROWS = normal(32, 16, seed=5)
COORDINATES = 4001 + np.arange(64).reshape(32, 2) * 17 % 97


@trap("positions past 256 (2048) have no bfloat16 (float16)", FREQUENCIES[None], ROWS, 4001 + np.arange(32))
def angles_by_an_outer_product(ops: Any, w: Any, x: Any, positions: Any) -> Any:
    return ops.matmul(x, EYE) * ops.sin(ops.matmul(ops.floats(positions)[:, None], w))


@trap("coordinates past 256 (2048) have no bfloat16 (float16)", PLANES, ROWS, COORDINATES)
def features_of_coordinates(ops: Any, w: Any, x: Any, coordinates: Any) -> Any:
    return ops.matmul(x, EYE) * ops.sin(ops.matmul(ops.floats(coordinates), w))


@trap("the product is rounded by more than the distance", EYE, in_sixteen_bits(100 + X), in_sixteen_bits(100 + Z))
def distances_from_squares(ops: Any, w: Any, x: Any, z: Any) -> Any:
    a = ops.matmul(x, w)
    squares = ops.sum(ops.square(a), -1) + ops.swapped(ops.sum(ops.square(z), -1))
    return squares - 2 * ops.matmul(a, ops.swapped(z))
