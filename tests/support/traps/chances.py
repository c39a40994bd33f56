"""Probabilities, their logarithms and losses by hand: 16 bits have no number between 0.9995 and 1, and no 1e-12."""

from typing import Any

import numpy as np

from support.traps.trap import EYE, FIRST, HITS, LABELS, LOGITS, X, Z, eye, in_sixteen_bits, trap


@trap("1 - 1e-7 is 1 in 16 bits, and log(1 - 1) follows", EYE, LOGITS, HITS)
def cross_entropy_of_clipped(ops: Any, w: Any, x: Any, hits: Any) -> Any:
    p = ops.clip(ops.sigmoid(ops.matmul(x, w)), 1e-7, 1 - 1e-7)
    return -ops.mean(hits * ops.log(p) + (1 - hits) * ops.log(1 - p))


@trap("1e-8 is 0 in float16", EYE, LOGITS, HITS)
def binary_cross_entropy_by_hand(ops: Any, w: Any, x: Any, hits: Any) -> Any:
    p = ops.sigmoid(ops.matmul(x, w))
    return -ops.mean(hits * ops.log(p + 1e-8) + (1 - hits) * ops.log(1 - p + 1e-8))


@trap("1 - p is 0 where p rounds to 1, and so is the derivative of its maximum", EYE, LOGITS)
def inverse_of_a_sigmoid(ops: Any, w: Any, x: Any) -> Any:
    p = ops.sigmoid(ops.matmul(x, w))
    return ops.log(ops.at_least(p, 1e-5) / ops.at_least(1 - p, 1e-5))


@trap("1e-12 is lost; a gradient of 1e11 meets a derivative of 1e-11", eye(2), LOGITS)
def log_of_sigmoid_and_epsilon(ops: Any, w: Any, x: Any) -> Any:
    return ops.log(ops.sigmoid(ops.matmul(x, w)) + 1e-12)


@trap("sigmoids that round to 0 and 1", EYE, LOGITS, HITS)
def focal_loss(ops: Any, w: Any, x: Any, hits: Any) -> Any:
    p = ops.sigmoid(ops.matmul(x, w))
    right = p * hits + (1 - p) * (1 - hits)
    return -ops.mean((1 - right) ** 2 * ops.log(right + 1e-8))


@trap("sums over 70,000 pixels are beyond float16", FIRST, np.full((70_000, 2), 4.0, np.float32))
def dice_loss(ops: Any, w: Any, x: Any) -> Any:
    p = ops.sigmoid(ops.matmul(x, w))
    return 65_536.0 * (2 * ops.sum(p * p) + 1e-6) / (ops.sum(p) + ops.sum(p * p) + 1e-6)


@trap("small probabilities round to 0, and 0 times -inf follows", eye(4), X, Z)
def divergence_by_hand(ops: Any, w: Any, x: Any, z: Any) -> Any:
    p, q = ops.softmax(ops.matmul(x, w)), ops.softmax(ops.matmul(z, w))
    return ops.sum(p * (ops.log(p) - ops.log(q)), -1)


@trap("1e-10 is 0 in float16, and 0 times -inf follows", eye(32), X)
def entropy_by_hand(ops: Any, w: Any, x: Any) -> Any:
    p = ops.softmax(ops.matmul(x, w))
    return -ops.sum(p * ops.log(p + 1e-10), -1)


@trap("exp(12) is beyond float16", eye(2), LOGITS)
def softplus_by_hand(ops: Any, w: Any, x: Any) -> Any:
    return ops.log(1 + ops.exp(ops.matmul(x, w)))


@trap("the library's own, of large numbers", eye(2), LOGITS)
def softplus(ops: Any, w: Any, x: Any) -> Any:
    return ops.softplus(ops.matmul(x, w))


@trap("the library's own, of large numbers", eye(2), LOGITS)
def log_sigmoid(ops: Any, w: Any, x: Any) -> Any:
    return ops.log_sigmoid(ops.matmul(x, w))


@trap("1e-10 is 0 in float16, and log(0) follows", eye(16), X, LABELS)
def cross_entropy_by_softmax(ops: Any, w: Any, x: Any, labels: Any) -> Any:
    p = ops.softmax(ops.matmul(x, w))
    return -ops.mean(ops.sum(ops.one_hot(labels, 16) * ops.log(p + 1e-10), -1))


@trap("a difference of large numbers, by hand", eye(128), X, LABELS)
def cross_entropy_by_logsumexp(ops: Any, w: Any, x: Any, labels: Any) -> Any:
    y = ops.matmul(x, w)
    return ops.mean(ops.sum(ops.one_hot(labels, 16) * (ops.logsumexp(y) - y), -1))


@trap("exp(12) is beyond float16", eye(2), LOGITS, LABELS)
def cross_entropy_by_exp(ops: Any, w: Any, x: Any, labels: Any) -> Any:
    y = ops.matmul(x, w)
    chosen = ops.sum(ops.one_hot(labels, 16) * y, -1)
    return ops.mean(ops.log(ops.sum(ops.exp(y), -1)) - chosen)


@trap("a sigmoid that rounds to 1", EYE, LOGITS)
def log_of_one_minus_sigmoid(ops: Any, w: Any, x: Any) -> Any:
    return ops.log(1 - ops.sigmoid(ops.matmul(x, w)))


@trap("p / (1 - p) is inf where p rounds to 1", EYE, LOGITS * 0.5)
def logit_by_hand(ops: Any, w: Any, x: Any) -> Any:
    p = ops.sigmoid(ops.matmul(x, w))
    return ops.log(p / (1 - p))


@trap("1 - 1e-7 is 1 in 16 bits, and atanh(1) follows", EYE, LOGITS * 0.5)
def atanh_of_clipped_tanh(ops: Any, w: Any, x: Any) -> Any:
    return ops.atanh(ops.clip(ops.tanh(ops.matmul(x, w)), -1 + 1e-7, 1 - 1e-7))


@trap("smoothed labels of 1e-5 next to large logarithms", eye(64), X, LABELS)
def label_smoothing(ops: Any, w: Any, x: Any, labels: Any) -> Any:
    soft = ops.one_hot(labels, 16) * (1 - 1.6e-4) + 1e-5
    return -ops.mean(ops.sum(soft * ops.log_softmax(ops.matmul(x, w)), -1))


@trap("1e-8 is 0 in float16, and log(0) follows", EYE, X)
def log_of_relu_and_epsilon(ops: Any, w: Any, x: Any) -> Any:
    return ops.log(ops.relu(ops.matmul(x, w)) + 1e-8)


COLD = np.array([in_sixteen_bits(np.linspace(0, 1, 16))] * 8)


@trap("a temperature that is learnt: exp(10) times a similarity", EYE, COLD, np.array(10.0, np.float32))
def temperature(ops: Any, w: Any, x: Any, log_scale: Any) -> Any:
    return ops.softmax(ops.exp(log_scale) * ops.matmul(x, w) * 1e-3)
