"""Replicas of a ``tf.distribute`` strategy decide together whether a step is applied.

Optimizers sum gradients over replicas inside their update, so each replica tests gradients that the others have not
seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from polyamp.refusals import outside_replicas, without_common_step


def all_replicas(finite: tf.Tensor) -> tf.Tensor:
    """Return whether ``finite``, a scalar bool, is true in every replica."""
    if not tf.distribute.has_strategy():
        return finite
    if error := without_common_step(tf.distribute.get_strategy()):
        raise error
    bad = tf.cast(tf.logical_not(finite), tf.float32)
    return tf.equal(_sum(bad), 0.0)


def summed(grads: Sequence[Any]) -> list[Any]:
    """Return the gradients that are not None, each summed over the replicas."""
    present = [grad for grad in grads if grad is not None]
    return list(_sum(present)) if tf.distribute.has_strategy() else present


def _sum(value: Any) -> Any:
    return replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)


def replica_context() -> tf.distribute.ReplicaContext:
    """Return the context of the replica that runs this code."""
    context = tf.distribute.get_replica_context()
    if context is None:
        raise outside_replicas(tf.distribute.get_strategy())
    return context
