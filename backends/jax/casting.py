"""Casts of pytrees to a format."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.backends.jax.dtypes import dtype_of, is_floating, is_low


def cast(tree: Any, format_name: str) -> Any:
    """Return a pytree with its floating-point arrays in a format and all other leaves unchanged. No host sync.

    >>> cast({"w": jnp.ones(2), "n": jnp.arange(2), "p": 0.5}, "float16")["w"].dtype
    dtype('float16')

    Args:
        tree: any pytree; NumPy arrays stay NumPy arrays, and a ``jax.ShapeDtypeStruct`` stays one.
        format_name: a format of `polyamp.formats.FORMATS`.

    Raises:
        InvalidValueError: the format is unknown, or it is float64 and JAX has float64 disabled.
    """
    dtype = dtype_of(format_name)
    return jax.tree.map(lambda leaf: _as(leaf, dtype) if is_floating(leaf) else leaf, tree)


def widened(tree: Any) -> Any:
    """Return a pytree with its 16-bit arrays in float32."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if is_low(leaf) else leaf, tree)


def _as(leaf: Any, dtype: np.dtype[Any]) -> Any:
    if leaf.dtype == dtype:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)  # type: ignore[no-untyped-call]
    with np.errstate(over="ignore"):  # beyond the format's range the result is inf, as in IEEE 754
        return leaf.astype(dtype)
