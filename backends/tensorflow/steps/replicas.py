"""Replicas of a ``tf.distribute`` strategy decide together whether a step is applied.

Optimizers sum gradients over replicas inside their update, so each replica tests gradients that the others have not
seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from polyamp.errors import UsageError


def all_replicas(finite: tf.Tensor) -> tf.Tensor:
    """Return whether ``finite``, a scalar bool, is true in every replica.

    >>> bool(all_replicas(tf.constant(True)))
    True

    Raises:
        UsageError: in the scope of a strategy, but outside its replicas.
    """
    if not tf.distribute.has_strategy():
        return finite
    bad = tf.cast(tf.logical_not(finite), tf.float32)
    return tf.equal(_sum(bad), 0.0)


def summed(grads: Sequence[Any]) -> list[Any]:
    """Return the gradients that are not None, each summed over the replicas."""
    present = [grad for grad in grads if grad is not None]
    return list(_sum(present)) if tf.distribute.has_strategy() else present


def update_if(finite: tf.Tensor, update: Callable[[Sequence[Any]], Any], grads: Sequence[Any]) -> tf.Tensor:
    """Run ``update(grads)``, which returns an operation or None, if ``finite``: in every replica or in none.

    Returns:
        ``finite``, which is available once the update has run.
    """
    if not tf.distribute.has_strategy():
        return _run_if(finite, lambda: update(grads))

    # An optimizer's update merges replicas, even a single one, and TensorFlow forbids that inside a conditional of a
    # replica. So the conditional is put around the replicas.
    def across(strategy: tf.distribute.Strategy, decided: Any, per_replica: Any) -> tf.Tensor:
        def run() -> Any:
            return strategy.group(strategy.extended.call_for_each_replica(update, args=(per_replica,)))

        return _run_if(strategy.experimental_local_results(decided)[0], run)

    return _replica_context().merge_call(across, args=(finite, list(grads)))


def _run_if(finite: tf.Tensor, run: Callable[[], Any]) -> tf.Tensor:
    def apply() -> tf.Tensor:
        with after([run()]):
            return tf.constant(True)

    return tf.cond(finite, apply, lambda: tf.constant(False))


def after(operations: Sequence[Any]) -> AbstractContextManager[Any]:
    """Return a context whose operations run after these; other objects than operations and tensors are ignored.

    Inside a ``tf.function`` TensorFlow keeps the order itself; in a graph of a ``Session`` only this does.

    >>> with after([None]):
    ...     int(tf.constant(1))
    1
    """
    return tf.control_dependencies([one for one in operations if isinstance(one, tf.Operation | tf.Tensor)])


def _sum(value: Any) -> Any:
    return _replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)


def _replica_context() -> tf.distribute.ReplicaContext:
    context = tf.distribute.get_replica_context()
    if context is None:
        raise UsageError(
            "the step must run inside the strategy's replicas",
            where=f"the scope of a {type(tf.distribute.get_strategy()).__name__}",
            allowed="a function that every replica runs",
            fix="put the gradients and the step into one function, and call strategy.run(function)",
        )
    return context
