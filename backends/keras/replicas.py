"""Replicas of a ``tf.distribute`` strategy decide together. For Keras on TensorFlow only.

Keras sums gradients over replicas inside its update, so each replica tests gradients that the others have not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def all_replicas(finite: tf.Tensor) -> tf.Tensor:
    """Whether ``finite``, a scalar bool, holds in every replica. To be called in a replica."""
    bad = tf.cast(tf.logical_not(finite), tf.float32)
    return tf.equal(tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, bad), 0.0)


def summed(grads: Sequence[Any]) -> list[Any]:
    """The gradients that are there, each summed over the replicas. To be called in a replica."""
    present = [grad for grad in grads if grad is not None]
    return list(tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, present))


def update_replicas_if(finite: tf.Tensor, update: Callable[[Sequence[Any]], None], grads: Sequence[Any]) -> None:
    """Run ``update(grads)`` in every replica where ``finite``, the same in all of them, holds."""
    # Keras' update calls merge_call, which TensorFlow forbids inside a conditional of a replica, so the conditional is
    # put around the replicas. Strategies that do not merge have no such rule. Keras' own wrapper asks the same way.
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        tf.cond(finite, lambda: update(grads), lambda: None)
        return

    def across(strategy: tf.distribute.Strategy, decided: Any, per_replica: Any) -> None:
        def run() -> None:
            strategy.extended.call_for_each_replica(update, args=(per_replica,))

        tf.cond(strategy.experimental_local_results(decided)[0], run, lambda: None)

    tf.distribute.get_replica_context().merge_call(across, args=(finite, list(grads)))
