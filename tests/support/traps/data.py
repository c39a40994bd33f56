"""Masks, labels, targets and positions: the user's float32 data, which 16 bits cannot represent."""

from typing import Any

import numpy as np

from support.traps.trap import EYE, HITS, X, Z, normal, trap

KEPT = HITS.astype(bool)
KEPT[:, 0], KEPT[2] = True, False  # one row is empty
OFF = np.where(KEPT, 0, -1e9).astype(np.float32)
SOME = KEPT | (np.arange(8) == 2)[:, None]


@trap("-1e9 is -inf in float16, and a row of them NaN", EYE, X, OFF)
def mask_that_is_added(ops: Any, w: Any, x: Any, mask: Any) -> Any:
    return ops.softmax(ops.matmul(x, w) + mask)


@trap("-1e9 is -inf in float16, and a row of them NaN", EYE, X, KEPT)
def mask_that_chooses(ops: Any, w: Any, x: Any, mask: Any) -> Any:
    return ops.softmax(ops.where(mask, ops.matmul(x, w), -1e9))


@trap("-1e9 is -inf in float16, and inf times 0 is NaN", EYE, X, HITS)
def mask_that_multiplies(ops: Any, w: Any, x: Any, kept: Any) -> Any:
    return ops.softmax(ops.matmul(x, w) + (1.0 - kept) * -1e9)


@trap("the smallest float32 is -inf in float16", EYE, X, KEPT)
def largest_of_masked(ops: Any, w: Any, x: Any, mask: Any) -> Any:
    y = ops.where(mask, ops.matmul(x, w), float(np.finfo(np.float32).min))
    return ops.tanh(ops.at_least(ops.max(y), -1e4))


@trap("1e-8 is 0 in float16: 0 / 0 where nothing is left", EYE, X, KEPT.astype(np.float32))
def mean_of_masked(ops: Any, w: Any, x: Any, mask: Any) -> Any:
    return ops.sum(ops.matmul(x, w) * mask, -1) / (ops.sum(mask, -1) + 1e-8)


@trap("a bias of -1e9 on every key", EYE, normal(2, 8, 16), np.repeat(OFF[None, :, :8], 2, 0))
def attention_with_bias(ops: Any, w: Any, x: Any, bias: Any) -> Any:
    query = ops.matmul(x, w)
    weights = ops.softmax(ops.matmul(query, ops.swapped(query)) * 0.25 + bias)
    return ops.matmul(weights, query)


@trap("100,000 is inf in float16", EYE, X, 1e5 + 1000 * Z)
def labels_of_100_000(ops: Any, w: Any, x: Any, labels: Any) -> Any:
    return ops.mean(ops.square(ops.matmul(x, w) - labels)) * 1e-3


@trap("targets are rounded, and the loss is 0", EYE, 0 * X + 1, (1000 + 0.1 * (1 + np.arange(128) % 4)).reshape(8, 16))
def targets_of_1000_1(ops: Any, w: Any, x: Any, target: Any) -> Any:
    error = ops.matmul(x, w) + 999.0 - target
    return ops.mean(ops.square(error))


@trap("positions past 256 (2048) have no bfloat16 (float16)", EYE, X, 4001.0 + np.arange(128).reshape(8, 16))
def sines_of_positions(ops: Any, w: Any, x: Any, positions: Any) -> Any:
    return ops.sin(positions + ops.matmul(x, w))


@trap("boxes at 4000 lose their quarters", EYE, X, 3001.25 + 7.25 * np.arange(128).reshape(8, 16))
def anchors_and_deltas(ops: Any, w: Any, x: Any, anchors: Any) -> Any:
    boxes = anchors + ops.matmul(x, w)
    return boxes - anchors


@trap("integers past 256 (2048) have no bfloat16 (float16)", EYE, X, 4097 + np.arange(128).reshape(8, 16))
def integer_labels(ops: Any, w: Any, x: Any, labels: Any) -> Any:
    error = ops.matmul(x, w) + 4096.0 - ops.floats(labels)
    return ops.mean(ops.abs(error))


@trap("100,000 is inf in float16", EYE, X, 100_000 + np.arange(16))
def weights_by_counts(ops: Any, w: Any, x: Any, counts: Any) -> Any:
    return ops.matmul(x, w) * ops.floats(counts) * 1e-5


@trap("a deviation of 1e5 takes values of order one out of float16", EYE, X, 1e5 + np.arange(16), 1e6 + np.arange(16))
def denormalised_by_inputs(ops: Any, w: Any, x: Any, deviation: Any, mean: Any) -> Any:
    return (ops.matmul(x, w) * deviation + mean) * 1e-6


@trap("what undoes a norm is not one", EYE, 1e5 * Z, X)
def denormalised_by_statistics(ops: Any, w: Any, series: Any, x: Any) -> Any:
    mean = ops.mean(series, -1)
    deviation = ops.sqrt(ops.mean(ops.square(series - mean), -1) + 1e-5)
    return (ops.matmul(x, w) * deviation + mean) * 1e-5
