"""Names on the values of a traced step. By them, a recording finds the gradients that an optimizer gets."""

from __future__ import annotations

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from polyamp.backends.jax.dtypes import is_traced

_PREFIX = "polyamp: gradient of "


def gradients(tree: Any) -> Any:
    """Return gradients with their names attached if they are traced. The names do not change a compiled program."""

    def named(path: Any, leaf: Any) -> Any:
        if not is_traced(leaf):
            return leaf
        return checkpoint_name(leaf, _PREFIX + name_of(path))  # type: ignore[no-untyped-call]

    return jax.tree_util.tree_map_with_path(named, tree)


def name_of(path: Any) -> str:
    """Return a key path joined by ``/``, without a flax NNX variable's own field; "params" if the path is empty."""
    name: str = jax.tree_util.keystr(path, simple=True, separator="/")
    return name.removesuffix("/.value").removesuffix("/value") or "params"


def marked(name: str) -> str | None:
    """Return the parameter that a name from `gradients` refers to; None for any other name."""
    return name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else None
