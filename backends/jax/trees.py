"""Pytrees in which None replaces leaves that do not count, such as those without a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from polyamp.backends.jax.dtypes import is_trainable


def trainable(tree: Any) -> Any:
    """Return a pytree with None for every leaf that cannot have a gradient, as ``equinox.filter`` does."""
    return jax.tree.map(lambda leaf: leaf if is_trainable(leaf) else None, tree)


def merged(first: Any, second: Any) -> Any:
    """Return the leaves of ``first``, and those of ``second`` where ``first`` has None."""
    return map_with_none(lambda one, other: other if one is None else one, first, second)


def map_with_none(function: Callable[[Any, Any], Any], first: Any, second: Any) -> Any:
    """Map a function over the leaves of two pytrees; None in the first one is a leaf."""
    return jax.tree.map(function, first, second, is_leaf=lambda leaf: leaf is None)
