"""Sums, products, exponentials and constants that leave 16 bits, and loops that add up in them."""

from typing import Any

import numpy as np

from support.traps.trap import EYE, FIRST, LOGITS, X, eye, in_sixteen_bits, normal, trap

TOKENS = np.zeros(4096, np.int32)


@trap("70,000 is beyond float16, and 256 + 1 is 256 in bfloat16", FIRST, np.ones((70_000, 2), np.float32))
def sum_of_70_000(ops: Any, w: Any, x: Any) -> Any:
    return ops.sum(ops.matmul(x, w)) * 2.0**-12


@trap("256 + 1 is 256 in bfloat16, 2048 + 1 is 2048 in float16", FIRST, np.ones((4096, 2), np.float32))
def running_sum_of_4_096(ops: Any, w: Any, x: Any) -> Any:
    return ops.cumsum(ops.matmul(x, w)) * 2.0**-12


@trap("1.5^64 is beyond float16", eye(1.5), np.ones((4, 16), np.float32))
def product_of_64(ops: Any, w: Any, x: Any) -> Any:
    return ops.prod(ops.matmul(x, w)) * 1e-12


@trap("2048 + 0.5 is 2048 in both formats", EYE, 0 * X + 0.5, 0 * X + 2048)
def loop_that_adds(ops: Any, w: Any, x: Any, start: Any) -> Any:
    return ops.loop(48, lambda total: total + ops.matmul(x, w), start) - 2048.0


@trap("1.5^32 is beyond float16", EYE, 0 * X + 0.5, 0 * X + 1)
def loop_that_grows(ops: Any, w: Any, x: Any, start: Any) -> Any:
    return ops.log(ops.loop(32, lambda size: size + size * ops.matmul(x, w), start))


@trap("the gradient of one row is a sum over 4,096 tokens", normal(8, 16), TOKENS)
def equal_tokens(ops: Any, table: Any, tokens: Any) -> Any:
    return ops.sum(ops.matmul(ops.take(table, tokens), np.eye(16, dtype=np.float32)), 0) * 2.0**-12


@trap("exp(12) - 1 is beyond float16", eye(2), np.abs(LOGITS))
def log1p_of_expm1(ops: Any, w: Any, x: Any) -> Any:
    return ops.log1p(ops.expm1(ops.matmul(x, w)))


@trap("1 / 1e-5 is beyond float16", EYE, X)
def reciprocal(ops: Any, w: Any, x: Any) -> Any:
    return ops.log(1.0 / (ops.relu(ops.matmul(x, w)) + 1e-5))


@trap("1e-6 is half lost in float16, and what it divides overflows", EYE, X)
def division_by_a_millionth(ops: Any, w: Any, x: Any) -> Any:
    return ops.tanh(ops.matmul(x, w) / 1e-6 * 1e-7)


@trap("the factor is beyond float16", EYE, X)
def factor_of_70_000(ops: Any, w: Any, x: Any) -> Any:
    return ops.tanh(ops.matmul(x, w) * 70_000.0 * 1e-6)


@trap("what is added is beyond float16", EYE, X)
def root_of_a_million_more(ops: Any, w: Any, x: Any) -> Any:
    return ops.sqrt(ops.matmul(x, w) + 1e6)


@trap("the sum of a window is beyond float16", eye(512, 2), in_sixteen_bits(1 + np.abs(normal(2 * 16 * 16, 2))))
def average_of_a_window(ops: Any, w: Any, x: Any) -> Any:
    return ops.averaged(ops.matmul(x, w), 16)
