"""Let the replicas of a ``tf.distribute`` strategy decide together whether to skip. For Keras on TensorFlow only.

Keras sums gradients over replicas inside its update, so each replica tests gradients that the others have not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from polyamp.errors import outside_replicas, without_common_step


def all_replicas(finite: tf.Tensor) -> tf.Tensor:
    """Return whether ``finite``, a scalar bool, is true in every replica. Call all functions here inside a replica."""
    if error := without_common_step(tf.distribute.get_strategy()):
        raise error
    bad = tf.cast(tf.logical_not(finite), tf.float32)
    return tf.equal(_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, bad), 0.0)


def summed(grads: Sequence[Any]) -> list[Any]:
    """Return the gradients that are not None, each summed over the replicas."""
    present = [grad for grad in grads if grad is not None]
    return list(_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, present))


def update_replicas_if(finite: tf.Tensor, update: Callable[[Sequence[Any]], None], grads: Sequence[Any]) -> None:
    """Run ``update(grads)`` in every replica if ``finite``, which is the same in all of them."""

    # Keras' update merges replicas, even a single one and under every strategy, and TensorFlow forbids that inside a
    # conditional of a replica. So the conditional is put around the replicas.
    def across(strategy: tf.distribute.Strategy, decided: Any, per_replica: Any) -> None:
        def run() -> None:
            strategy.extended.call_for_each_replica(update, args=(per_replica,))

        tf.cond(strategy.experimental_local_results(decided)[0], run, lambda: None)

    _replica_context().merge_call(across, args=(finite, list(grads)))


def _replica_context() -> tf.distribute.ReplicaContext:
    """Return the context of this replica."""
    context = tf.distribute.get_replica_context()
    if context is None:
        raise outside_replicas(tf.distribute.get_strategy())
    return context
