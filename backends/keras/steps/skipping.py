"""Update or skip: one conditional, built as each of Keras' backends needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
from keras import ops

from polyamp.adapters import FINITE, UPDATE_SCOPE
from polyamp.backends.keras.backend import builds_graph, in_strategy, platform_of


def update_if(finite: Any, update: Callable[[Sequence[Any]], None], grads: Sequence[Any], variables: list[Any]) -> None:
    """Run ``update(grads)``, which assigns only to ``variables``, if ``finite``; else change no bit."""
    # The conditional runs on the device in TensorFlow graphs and in JAX programs, and on the host otherwise.
    if in_strategy():
        from polyamp.backends.keras.steps.replicas import update_replicas_if

        update_replicas_if(finite, update, grads)
    elif platform_of(finite) is not None:
        if finite:
            update(grads)
    elif keras.backend.backend() == "jax":
        _update_functionally(finite, update, grads, variables)
    else:
        ops.cond(finite, lambda: update(grads), lambda: None)


def update_scope() -> AbstractContextManager[Any]:
    """Return a context whose operations are named as part of the update, if a TensorFlow graph is being built."""
    if not builds_graph():
        return nullcontext()
    import tensorflow as tf

    # TensorFlow uses a name that ends with a slash as it is: without a prefix, and without a number the second time.
    above = tf.get_current_name_scope()
    return tf.name_scope(f"{above}/{UPDATE_SCOPE}/" if above else f"{UPDATE_SCOPE}/")


def decision(finite: Any) -> Any:
    """Return ``finite``, under a name by which a rewriter finds it if a TensorFlow graph is being built."""
    if not builds_graph():
        return finite
    import tensorflow as tf

    return tf.identity(finite, name=FINITE)


def _update_functionally(
    finite: Any, update: Callable[[Sequence[Any]], None], grads: Sequence[Any], variables: list[Any]
) -> None:
    """Return the new values from the branches and assign them outside: JAX's conditionals have no side effects."""
    before = [variable.value for variable in variables]

    def updated() -> list[Any]:
        with keras.StatelessScope(state_mapping=zip(variables, before, strict=True)) as scope:
            update(grads)
        return [scope.get_current_value(variable) for variable in variables]

    for variable, value in zip(variables, ops.cond(finite, updated, lambda: before), strict=True):
        variable.assign(value)
