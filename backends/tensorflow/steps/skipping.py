"""Update or skip: the conditional around an optimizer's update, in every replica or in none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.steps.replicas import replica_context


def update_if(finite: tf.Tensor, update: Callable[[Sequence[Any]], Any], grads: Sequence[Any]) -> tf.Tensor:
    """Run ``update(grads)``, which returns an operation or None, if ``finite``: in every replica or in none."""
    if not tf.distribute.has_strategy():
        return _run_if(finite, lambda: update(grads))

    # An optimizer's update merges replicas, even a single one, and TensorFlow forbids that inside a conditional of a
    # replica. So the conditional is put around the replicas.
    def across(strategy: tf.distribute.Strategy, decided: Any, per_replica: Any) -> tf.Tensor:
        def run() -> Any:
            return strategy.group(strategy.extended.call_for_each_replica(update, args=(per_replica,)))

        return _run_if(strategy.experimental_local_results(decided)[0], run)

    return replica_context().merge_call(across, args=(finite, list(grads)))


def _run_if(finite: tf.Tensor, run: Callable[[], Any]) -> tf.Tensor:
    def apply() -> tf.Tensor:
        with after([run()]):
            return tf.constant(True)

    return tf.cond(finite, apply, lambda: tf.constant(False))


def after(operations: Sequence[Any]) -> AbstractContextManager[Any]:
    """Return a context whose operations run after these; other objects than operations and tensors are ignored."""
    # Inside a ``tf.function`` TensorFlow keeps the order itself; in a graph of a ``Session`` only this does.
    return tf.control_dependencies([one for one in operations if isinstance(one, tf.Operation | tf.Tensor)])
