"""Gradients as a pytree: test, unscale, clip. Pure functions, for use inside and outside ``jit``."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp

from polyamp.backends.jax import unstable
from polyamp.backends.jax.casting import widened

SHRINK = 2.0**-90
"""Brings every float32 number below 2**38, so that sums of squares are finite."""


def all_finite(tree: Any) -> jax.Array:
    """Return whether all arrays of a pytree are finite; bool[]."""
    # It does not use the largest absolute value: XLA's maximum on CPUs can lose a NaN among many elements.
    flags = (jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))
    return computed_once(functools.reduce(jnp.logical_and, flags, jnp.array(True)))


def computed_once(flag: jax.Array) -> jax.Array:
    """Return a flag unchanged, from behind a square root; bool[]."""
    # XLA copies arithmetic of scalars into every kernel that uses its result, unless it is as expensive as a root. A
    # flag of all gradients is used by the kernels of all parameters: with copies, the program grows by their square.
    return jnp.sqrt(flag.astype(jnp.float32)) == 1


def unscaled(grads: Any, scale: jax.Array) -> Any:
    """Return gradients divided by the loss scale, in float32 or wider."""
    # In two factors: XLA divides by multiplying with the reciprocal, which it flushes to zero for a scale over 2**126.
    first = jnp.where(scale > 1, 0.25, 1.0).astype(scale.dtype)
    second = 1 / (scale * first)
    return jax.tree.map(lambda grad: grad * first * second, widened(grads))


def clipped(grads: Any, limit: float, axis_name: Hashable | None = None) -> Any:
    """Return gradients scaled down so that their global L2 norm is at most ``limit``; unchanged if it already is."""
    # The norm is computed in float32 or wider, and does not overflow for any finite gradients.
    norm, shrink = _norm(jax.tree.leaves(widened(grads)), axis_name)
    clips = norm > limit * shrink
    first, second = jnp.where(clips, shrink, 1), jnp.where(clips, limit / norm, 1)
    return jax.tree.map(lambda grad: (grad * first * second).astype(grad.dtype), grads)


def _norm(leaves: list[jax.Array], axis_name: Hashable | None) -> tuple[jax.Array, jax.Array]:
    """Return the global norm of the leaves times a factor, and this factor: 1 unless the sum of squares overflows."""
    # Both norms are computed, in one pass over the leaves. What depends on them lies behind a square root, without
    # which XLA would compute it anew for every parameter: see `computed_once`.
    wide = [jnp.abs(leaf) if jnp.iscomplexobj(leaf) else leaf for leaf in leaves]

    def norm(factor: float) -> jax.Array:
        squares: dict[tuple[Hashable, ...], Any] = {}  # by the axes to sum over: one sum over devices for each of them
        for leaf in wide:
            axes = _varying(leaf, axis_name)
            squares[axes] = squares.get(axes, jnp.float32(0)) + jnp.square(leaf * factor).sum()
        whole = (_sum_over(axes, local) for axes, local in squares.items())
        return jnp.sqrt(functools.reduce(jnp.add, whole, jnp.float32(0)))

    plain, shrunk = norm(1.0), norm(SHRINK)
    overflows = jnp.isinf(plain)
    return jnp.where(overflows, shrunk, plain), jnp.where(overflows, SHRINK, 1.0).astype(plain.dtype)


def _sum_over(axes: tuple[Hashable, ...], value: Any) -> Any:
    return jax.lax.psum(value, axes) if axes else value  # type: ignore[no-untyped-call]


def _varying(value: Any, axis_name: Hashable | None) -> tuple[Hashable, ...]:
    """Return those of the mapped axes along which a value varies."""
    names = axis_name if isinstance(axis_name, tuple | list) else (axis_name,)
    return tuple(name for name in names if name in unstable.varying_axes(value))
