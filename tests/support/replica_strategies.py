"""Strategies over two logical CPUs or two processes, one strategy for each process, made before TensorFlow starts."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

CPUS = ["CPU:0", "CPU:1"]
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * len(CPUS)
)


def without_merging() -> tf.distribute.Strategy:
    """Make a strategy as under XLA on GPUs, in the way of TensorFlow's own tests."""
    strategy = tf.distribute.MirroredStrategy(CPUS)
    strategy.extended._use_merge_call = lambda: False
    with strategy.scope():
        assert tf.__internal__.distribute.strategy_supports_no_merge_call()
    return strategy


STRATEGIES: dict[str, Callable[[], tf.distribute.Strategy]] = {
    "mirrored": lambda: tf.distribute.MirroredStrategy(CPUS),
    "without merging": without_merging,
    "one worker": tf.distribute.MultiWorkerMirroredStrategy,
    "two workers": tf.distribute.MultiWorkerMirroredStrategy,  # in two processes, one replica in each
}
# Strategies in one process give their collective operations the same numbers, and disturb each other.
KIND = os.environ["POLYAMP_TEST_STRATEGY"]
STRATEGY = STRATEGIES[KIND]()
COUNT = STRATEGY.num_replicas_in_sync
LOCAL = len(STRATEGY.extended.worker_devices)  # replicas of this process
several = pytest.mark.skipif(COUNT == 1, reason="for several replicas")

FINITE = [[1.0, 1.0], [1.0, 1.0]]
BAD = {
    "inf in the first": [[np.inf, 1.0], [1.0, 1.0]],
    "inf in the second": [[1.0, 1.0], [np.inf, 1.0]],
    "NaN in the second": [[1.0, 1.0], [1.0, np.nan]],
    "both, of opposite sign": [[np.inf, 1.0], [-np.inf, 1.0]],
}


def on_each(step: Callable[[Any], None], grads: Any) -> None:
    """Call ``step`` in every replica with its gradients."""

    def of(context: Any) -> tf.Tensor:
        return tf.constant(grads[context.replica_id_in_sync_group])

    step(STRATEGY.experimental_distribute_values_from_function(of))


def copies(variable: tf.Variable) -> list[Any]:
    """Return the value of each copy of a variable that this process has, one for each of its replicas."""
    return [value.numpy().tolist() for value in STRATEGY.experimental_local_results(variable)]
