"""Calibration of a TensorFlow step whose plain policy fails: rules for one scope, after which nothing overflows."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp.diagnosis.calibrate import calibrate

pytestmark = pytest.mark.slow


def make() -> tuple[list[tf.Variable], list[tuple[tf.Tensor, tf.Tensor]]]:
    rng = np.random.default_rng(0)
    sizes = [(16, 32, 0.3), (32, 32, 3000.0), (32, 10, 0.2)]
    weights = [tf.Variable(np.float32(rng.standard_normal((m, n)) * size)) for m, n, size in sizes]
    labels = rng.integers(0, 10, (3, 8))
    return weights, [(tf.constant(np.float32(np.eye(16)[y] * 40)), tf.constant(y)) for y in labels]


def test_the_scope_that_overflows_gets_its_rule() -> None:
    weights, batches = make()

    def loss_fn(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.name_scope("first"):
            hidden = tf.nn.relu(x @ weights[0])
        with tf.name_scope("wide"):
            hidden = (hidden @ weights[1]) * 1e-5
        with tf.name_scope("head"):
            logits = hidden @ weights[2]
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))

    before = polyamp.diagnose(loss_fn, *batches[0], policy="mixed_float16", scale=2.0**8)
    found = calibrate(loss_fn, batches, "mixed_float16")
    after = polyamp.diagnose(loss_fn, *batches[0], policy=found.policy, scale=2.0**8)
    assert (before.kind, after.kind) == ("forward", "finite")
    assert found.rules == {"wide/matmul": "full"}
    assert found.evidence[0].batches == 3
