"""Pytrees of arrays: cast, test, unscale, clip, update, select. Pure functions, for use inside and outside ``jit``."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.backends.jax.dtypes import dtype_of, is_floating, is_low, is_trainable


def cast(tree: Any, format_name: str) -> Any:
    """Return a pytree with its floating-point arrays in a format and all other leaves unchanged. No host sync.

    >>> cast({"w": jnp.ones(2), "n": jnp.arange(2), "p": 0.5}, "float16")["w"].dtype
    dtype('float16')

    Args:
        tree: any pytree; NumPy arrays stay NumPy arrays, and a ``jax.ShapeDtypeStruct`` stays one.
        format_name: a format of `polyamp.FORMATS`.

    Raises:
        InvalidValueError: the format is unknown, or it is float64 and JAX has float64 disabled.
    """
    dtype = dtype_of(format_name)
    return jax.tree.map(lambda leaf: _as(leaf, dtype) if is_floating(leaf) else leaf, tree)


def _as(leaf: Any, dtype: np.dtype[Any]) -> Any:
    if leaf.dtype == dtype:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)  # type: ignore[no-untyped-call]
    with np.errstate(over="ignore"):  # beyond the format's range the result is inf, as in IEEE 754
        return leaf.astype(dtype)


def trainable(tree: Any) -> Any:
    """Return a pytree with None for every leaf that cannot have a gradient, as ``equinox.filter`` does.

    >>> trainable({"w": 1.0, "n": jnp.arange(2), "f": jax.nn.relu})
    {'f': None, 'n': None, 'w': None}
    """
    return jax.tree.map(lambda leaf: leaf if is_trainable(leaf) else None, tree)


def merged(first: Any, second: Any) -> Any:
    """Return the leaves of ``first``, and those of ``second`` where ``first`` has None.

    >>> merged({"w": 1, "f": None}, {"w": 2, "f": 3})
    {'f': 3, 'w': 1}
    """
    return _map_with_none(lambda one, other: other if one is None else one, first, second)


def widened(tree: Any) -> Any:
    """Return a pytree with its 16-bit arrays in float32.

    >>> widened(jnp.ones(2, jnp.float16)).dtype
    dtype('float32')
    """
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if is_low(leaf) else leaf, tree)


def all_finite(tree: Any) -> jax.Array:
    """Return whether all arrays of a pytree are finite; bool[].

    It does not use the largest absolute value: XLA's maximum on CPUs can lose a NaN among many elements.

    >>> bool(all_finite([jnp.ones(2), jnp.array([1.0, jnp.nan])]))
    False
    """
    flags = (jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))
    return functools.reduce(jnp.logical_and, flags, jnp.array(True))


def unscaled(grads: Any, scale: jax.Array) -> Any:
    """Return gradients divided by the loss scale, in float32 or wider.

    >>> unscaled(jnp.array([2.0**-24], jnp.float16), jnp.float32(2.0**16))
    Array([9.094947e-13], dtype=float32)
    """
    # In two factors: XLA divides by multiplying with the reciprocal, which it flushes to zero for a scale over 2**126.
    first = jnp.where(scale > 1, 0.25, 1.0).astype(scale.dtype)
    second = 1 / (scale * first)
    return jax.tree.map(lambda grad: grad * first * second, widened(grads))


def clipped(grads: Any, limit: float) -> Any:
    """Return gradients scaled down so that their global L2 norm is at most ``limit``; unchanged if it already is.

    The norm is computed in float32 or wider, and does not overflow for any finite gradients.

    >>> clipped([jnp.array([3.0]), jnp.array([4.0])], 1.0)
    [Array([0.6], dtype=float32), Array([0.8], dtype=float32)]
    """
    wide = [jnp.abs(leaf) if jnp.iscomplexobj(leaf) else leaf for leaf in jax.tree.leaves(widened(grads))]
    largest = functools.reduce(jnp.maximum, (jnp.abs(leaf).max(initial=0) for leaf in wide), jnp.float32(0))
    shrink = jnp.where(largest > 2.0**40, 2.0**-90, 1.0).astype(largest.dtype)  # squares stay below 2**80
    squares = (jnp.square(leaf * shrink).sum() for leaf in wide)
    norm = jnp.sqrt(functools.reduce(jnp.add, squares, jnp.float32(0)))  # of the shrunk gradients
    clips = norm > limit * shrink
    first, second = jnp.where(clips, shrink, 1), jnp.where(clips, limit / norm, 1)
    return jax.tree.map(lambda grad: (grad * first * second).astype(grad.dtype), grads)


def zero_updates(grads: Any) -> Any:
    """Return updates that change no bit of any parameter: -0.0, since adding +0.0 would turn -0.0 into +0.0.

    >>> zero_updates(jnp.ones(1, jnp.float16))
    Array([-0.], dtype=float32)
    """
    return jax.tree.map(lambda grad: -jnp.zeros_like(grad), widened(grads))


def apply_updates(params: Any, updates: Any) -> Any:
    """Return parameters plus updates, in each parameter's own dtype; a leaf whose update is None is unchanged.

    >>> apply_updates({"w": jnp.ones(1, jnp.float16)}, {"w": jnp.array([0.5])})
    {'w': Array([1.5], dtype=float16)}

    Unlike ``optax.apply_updates`` it accepts None as an update. Unlike ``equinox.apply_updates`` it keeps a 16-bit
    parameter in 16 bits when its update is float32.
    """
    return _map_with_none(
        lambda update, param: param if update is None else jnp.add(param, update).astype(param.dtype), updates, params
    )


def select(applied: Any, new: Any, old: Any) -> Any:
    """Return ``new`` if the step was applied, else ``old``: for your own state that a skipped step must not change.

    >>> select(jnp.array(False), {"mean": jnp.ones(1)}, {"mean": jnp.zeros(1)})
    {'mean': Array([0.], dtype=float32)}

    Args:
        applied: ``opt_state.last_step.applied``; bool[] or a Python bool.
        new: pytree of arrays after this step, such as batch-norm statistics.
        old: the same before it.
    """
    return jax.tree.map(lambda one, other: jnp.where(applied, one, other), new, old)


def _map_with_none(function: Any, first: Any, second: Any) -> Any:
    return jax.tree.map(function, first, second, is_leaf=lambda leaf: leaf is None)
