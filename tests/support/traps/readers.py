"""Values whose format depends on their readers, on equal values, on derivatives, or on a table's smallest element."""

from typing import Any

import numpy as np

from support.traps.trap import EYE, FIRST, X, Z, beside_zeros, eye, in_sixteen_bits, normal, trap

LARGE, SMALL = (in_sixteen_bits(np.linspace(*ends, 128).reshape(8, 16)) for ends in ((900, 5000), (5e-4, 2e-3)))
HUNDREDS, BOXES = 300 + 20 * np.clip(normal(8, 16), -2, 2), 100 + 150 * np.abs(normal(8, 16, seed=5))
IMAGES, TARGETS = (in_sixteen_bits(0.4 + 0.2 * np.random.default_rng(seed).random((1024, 1))) for seed in (7, 8))
BELL = np.exp(-(np.arange(-2, 3) ** 2) / 4.5)
WINDOW = (np.outer(BELL, BELL) / np.outer(BELL, BELL).sum()).astype(np.float32)


@trap("a square: 512^2 is beyond float16", eye(512), X)
def the_same_product_twice(ops: Any, w: Any, x: Any) -> Any:
    return ops.mean(ops.matmul(x, w) * ops.matmul(x, w)) * 2.0**-6


@trap("a square: 512^2 is beyond float16", eye(512), X)
def abs_times_abs(ops: Any, w: Any, x: Any) -> Any:
    y = ops.matmul(x, w)
    return ops.mean(ops.abs(y) * ops.abs(y)) * 2.0**-6


@trap("a square: 512^2 is beyond float16", eye(512), X)
def minus_itself_times_itself(ops: Any, w: Any, x: Any) -> Any:
    y = ops.matmul(x, w)
    return ops.mean(-y * y) * 2.0**-6


@trap("a square: 512^2 is beyond float16", eye(512), X)
def flat_times_flat(ops: Any, w: Any, x: Any) -> Any:
    y = ops.matmul(x, w)
    return ops.mean(ops.flat(y) * ops.flat(ops.flat(y))) * 2.0**-6


def cosine(ops: Any, w: Any, x: Any, z: Any) -> Any:
    a, b = ops.matmul(x, w), ops.matmul(z, w)
    return ops.sum(a * b, -1) / ops.at_least(ops.norm(a) * ops.norm(b), 1e-12)


@trap("the terms of a dot product are beyond float16", eye(256), X, Z)
def cosine_by_dot_product(ops: Any, w: Any, x: Any, z: Any) -> Any:
    return cosine(ops, w, x, z)


@trap("the terms of a dot product are lost in float16", eye(2.0**-13), X, Z)
def cosine_by_dot_of_small(ops: Any, w: Any, x: Any, z: Any) -> Any:
    return cosine(ops, w, x, z)


@trap("the products of differences are beyond float16", eye(256), X, Z)
def correlation(ops: Any, w: Any, x: Any, z: Any) -> Any:
    a, b = ops.matmul(x, w), ops.matmul(z, w)
    a, b = a - ops.mean(a, -1), b - ops.mean(b, -1)
    return ops.sum(a * b, -1) / ops.sqrt(ops.sum(a * a, -1) * ops.sum(b * b, -1))


@trap(
    "the difference of two rounded products", EYE, in_sixteen_bits(HUNDREDS), in_sixteen_bits(np.roll(HUNDREDS, 3, 0))
)
def determinant(ops: Any, w: Any, x: Any, z: Any) -> Any:
    a, b = ops.matmul(x, w), ops.matmul(z, w)
    return (a[:, :8] * b[:, 8:] - a[:, 8:] * b[:, :8]) * 1e-4


@trap("areas in pixels are beyond float16", EYE, in_sixteen_bits(BOXES), in_sixteen_bits(np.roll(BOXES, 3, 0)))
def overlap_of_boxes(ops: Any, w: Any, x: Any, z: Any) -> Any:
    a, b = ops.matmul(x, w), ops.matmul(z, w)
    both = ops.least(a[:, :8], b[:, :8]) * ops.least(a[:, 8:], b[:, 8:])
    return both / (a[:, :8] * a[:, 8:] + b[:, :8] * b[:, 8:] - both)


def similarity(ops: Any, mean: Any, a: Any, b: Any) -> Any:
    """Return SSIM, of images in [0, 1]."""
    at_a, at_b = mean(a), mean(b)
    spread = mean(a * a) - at_a * at_a + mean(b * b) - at_b * at_b
    shared = mean(a * b) - at_a * at_b
    return ops.mean((2 * at_a * at_b + 1e-4) * (2 * shared + 9e-4) / ((at_a**2 + at_b**2 + 1e-4) * (spread + 9e-4)))


@trap("E[ab] - E[a]E[b], of rounded pools", FIRST, beside_zeros(IMAGES), beside_zeros(TARGETS), roundings=50)
def similarity_of_images(ops: Any, w: Any, x: Any, z: Any) -> Any:
    return similarity(ops, lambda y: ops.averaged(y, 8), ops.matmul(x, w), ops.matmul(z, w))


@trap("E[ab] - E[a]E[b], of squares that a convolution rounds", FIRST, beside_zeros(IMAGES), TARGETS, roundings=50)
def similarity_by_a_window(ops: Any, w: Any, x: Any, z: Any) -> Any:
    return similarity(ops, lambda y: ops.blurred(y, 16, WINDOW), ops.matmul(x, w), z)


@trap("1 / y^2, which a derivative has, is 0 in float16", EYE, LARGE, np.roll(LARGE, 3, 0), roundings=24)
def ratio_of_thousands(ops: Any, w: Any, x: Any, z: Any) -> Any:
    return ops.matmul(x, w) / ops.matmul(z, w)


@trap("1 / y^2, which a derivative has, is beyond float16", EYE, SMALL, np.roll(SMALL, 3, 0), roundings=24)
def ratio_of_thousandths(ops: Any, w: Any, x: Any, z: Any) -> Any:
    return ops.matmul(x, w) / ops.matmul(z, w)


@trap("the last of the decays is 0 in float16", EYE, X)
def discounted_sums(ops: Any, w: Any, x: Any) -> Any:
    decays = ops.array(np.float32(0.35) ** np.arange(16, dtype=np.float32))
    return ops.cumsum(ops.matmul(x, w) * decays) / decays


@trap("two roundings of one gradient, which cancel in a softmax's derivative if they are equal", eye(4), X)
def attention_of_sums(ops: Any, w: Any, x: Any) -> Any:
    y = ops.matmul(x, w)
    total = ops.sum(y, -1)
    return ops.matmul(ops.softmax(total + ops.swapped(total)), y)


@trap("x^2 + y^2, which a derivative has, is beyond float16", eye(256), X, Z)
def angle_of_large(ops: Any, w: Any, x: Any, z: Any) -> Any:
    return ops.atan2(ops.matmul(x, w), ops.matmul(z, w))


@trap("x^2 + y^2, which a derivative has, is lost in float16", eye(2.0**-10), X, Z)
def angle_of_small(ops: Any, w: Any, x: Any, z: Any) -> Any:
    return ops.atan2(ops.matmul(x, w), ops.matmul(z, w))
