"""Marks for the update in a graph that is being built, so that a later rewrite of the graph leaves it unchanged.

Eager code has no graph, and no cost here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from polyamp.adapter import FINITE, UPDATE_SCOPE


def update_scope() -> AbstractContextManager[Any]:
    """Return a context that names its operations as part of the update. It may be reused and nested."""
    scopes = _scopes()
    return nullcontext() if tf.executing_eagerly() or UPDATE_SCOPE in scopes else _absolute([*scopes, UPDATE_SCOPE])


def outside_update_scope() -> AbstractContextManager[Any]:
    """Return a context that leaves `update_scope`, since a variable's name in a checkpoint comes from its scope."""
    scopes = _scopes()
    if tf.executing_eagerly() or UPDATE_SCOPE not in scopes:
        return nullcontext()
    return _absolute([scope for scope in scopes if scope != UPDATE_SCOPE])


def decision(finite: tf.Tensor) -> tf.Tensor:
    """Return ``finite``, the scalar bool that decides whether a step is applied, under its marked name."""
    return finite if tf.executing_eagerly() else tf.identity(finite, name=FINITE)


def apply_gradients(optimizer: Any, pairs: Sequence[tuple[Any, Any]], options: Mapping[str, Any]) -> Any:
    """Run ``optimizer.apply_gradients(pairs, **options)``, marked as update, without renaming its slots."""
    is_v1 = isinstance(optimizer, tf.compat.v1.train.Optimizer)  # these take no name where replicas merge
    if tf.executing_eagerly() or not is_v1 or tf.distribute.has_strategy():
        return optimizer.apply_gradients(pairs, **options)
    # These make some of their variables before they enter the scope whose name they get.
    name = f"{UPDATE_SCOPE}/{options.get('name') or optimizer.get_name()}"
    with outside_update_scope():
        return optimizer.apply_gradients(pairs, **{**options, "name": name})


def _scopes() -> list[str]:
    return [scope for scope in tf.get_current_name_scope().split("/") if scope]


def _absolute(scopes: Sequence[str]) -> AbstractContextManager[Any]:
    """Enter an absolute name scope. TensorFlow adds no prefix or number to a name that ends with "/"; "" is root."""
    return tf.name_scope("".join(f"{scope}/" for scope in scopes))
