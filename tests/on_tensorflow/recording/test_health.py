"""The counters of the loss scale in TensorFlow's variables and checkpoints, in eager code and in functions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tensorflow as tf

from polyamp import LossScale
from polyamp.backends.tensorflow import LossScaler
from polyamp.diagnosis.health import Health, health
from support.loss_scale_cases import read, walk

CONFIG = LossScale(interval=3, on_min="ignore")
TRACE = "!!....!.."


def drive(scaler: LossScaler, trace: str, *, compiled: bool = False) -> None:
    weight = tf.Variable([1.0, 2.0])
    sgd = tf.compat.v1.train.GradientDescentOptimizer(0.1)

    def step(grad: tf.Tensor) -> None:
        scaler.step(sgd, [(grad, weight)])

    run = tf.function(step) if compiled else step
    for finite in read(trace):
        run(tf.constant([1.0 if finite else np.nan, 1.0]))


def test_eager_steps_go_on_where_a_function_ended() -> None:
    scaler = LossScaler(CONFIG)
    for half, compiled in ((TRACE[:5], True), (TRACE[5:], False), (TRACE, True)):
        drive(scaler, half, compiled=compiled)
    assert health(scaler) == Health(CONFIG, walk(CONFIG, read(TRACE * 2))[-1])


def test_a_checkpoint_without_counters_is_read(tmp_path: Path) -> None:
    scaler, before, after = LossScaler(CONFIG), tf.Module(), LossScaler(CONFIG)
    drive(scaler, TRACE)
    before.scalars = scaler.scalars[:5]
    path = tf.train.Checkpoint(scaler=before).save(tmp_path / "saved")
    tf.train.Checkpoint(scaler=after).restore(path).expect_partial()
    assert health(after).counters == (*health(scaler).counters[:5], 0, 0, 0, 0, 0.0)
