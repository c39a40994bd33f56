"""Marks the update in a graph that is being built, so that whoever rewrites the graph leaves it as it is.

Eager code has no graph, and pays nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from polyamp.markers import FINITE, UPDATE_SCOPE


def update_scope() -> AbstractContextManager[Any]:
    """A context whose operations are named as part of the update; it may be entered again, and inside of itself.

    >>> with tf.Graph().as_default(), tf.name_scope("train"), update_scope(), update_scope():
    ...     print(tf.constant(1.0, name="rate").name)
    train/polyamp_update/rate:0
    """
    scopes = _scopes()
    return nullcontext() if tf.executing_eagerly() or UPDATE_SCOPE in scopes else _absolute([*scopes, UPDATE_SCOPE])


def outside_update_scope() -> AbstractContextManager[Any]:
    """A context that leaves `update_scope`: a variable takes its name in a checkpoint from where it is made.

    >>> with tf.Graph().as_default(), tf.name_scope("train"), update_scope(), outside_update_scope():
    ...     print(tf.constant(1.0, name="slot").name)
    train/slot:0
    """
    scopes = _scopes()
    if tf.executing_eagerly() or UPDATE_SCOPE not in scopes:
        return nullcontext()
    return _absolute([scope for scope in scopes if scope != UPDATE_SCOPE])


def decision(finite: tf.Tensor) -> tf.Tensor:
    """``finite``, the scalar bool that says whether a step is applied, under its name."""
    return finite if tf.executing_eagerly() else tf.identity(finite, name=FINITE)


def apply_gradients(optimizer: Any, pairs: Sequence[tuple[Any, Any]], options: Mapping[str, Any]) -> Any:
    """``optimizer.apply_gradients(pairs, **options)``, marked, while its slots keep their names."""
    is_v1 = isinstance(optimizer, tf.compat.v1.train.Optimizer)  # which takes no name where replicas merge
    if tf.executing_eagerly() or not is_v1 or tf.distribute.has_strategy():
        return optimizer.apply_gradients(pairs, **options)
    # They make some of their variables here, before they enter the scope that they are given by name.
    name = f"{UPDATE_SCOPE}/{options.get('name') or optimizer.get_name()}"
    with outside_update_scope():
        return optimizer.apply_gradients(pairs, **{**options, "name": name})


def _scopes() -> list[str]:
    return [scope for scope in tf.get_current_name_scope().split("/") if scope]


def _absolute(scopes: Sequence[str]) -> AbstractContextManager[Any]:
    """With a slash at its end TensorFlow takes a name as it is, and adds neither prefix nor number; "" is the root."""
    return tf.name_scope("".join(f"{scope}/" for scope in scopes))
