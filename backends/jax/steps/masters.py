"""Master weights: float32 copies of the 16-bit parameters, with None for the others.

For example, the masters of ``{"w": f16[2], "b": f32[2]}`` are ``{"w": f32[2], "b": None}``. The optimizer sees the
parameters with the masters in place of ``w``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from polyamp.backends.jax.dtypes import is_low
from polyamp.backends.jax.trees import map_with_none


def masters_of(params: Any, *, low: bool = False) -> Any:
    """Return float32 copies of the 16-bit parameters, with None for the others; None if no parameter has 16 bits."""
    masters = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if is_low(leaf) else None, params)
    stands_for_params = low and not jax.tree.leaves(params)
    return masters if jax.tree.leaves(masters) or stands_for_params else None


def masters_in(full: Any, masters: Any) -> Any:
    """Return the new master weights: the leaves of ``full`` that have one; None if there are none."""
    if masters is None:
        return None
    return map_with_none(lambda master, value: None if master is None else value, masters, full)


def updates_to(masters: Any, params: Any, updates: Any) -> Any:
    """Return the float32 updates that take 16-bit parameters to their rounded master weights; others are unchanged."""

    def update_to(master: Any, param: Any, update: Any) -> Any:
        if master is None:
            return update
        return master.astype(param.dtype).astype(jnp.float32) - param.astype(jnp.float32)

    return jax.tree.map(update_to, masters, params, updates, is_leaf=lambda leaf: leaf is None)
