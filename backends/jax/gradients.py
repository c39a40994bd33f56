"""What a step does to gradients and parameters: test, unscale, clip, update or skip, with or without master weights.

All are pure functions, for use inside and outside ``jit``. The names by which a recording finds gradients are here too.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from polyamp.backends.jax import unstable
from polyamp.backends.jax.casting import fitting, is_array, is_low, is_traced, map_with_none, name_of, widened
from polyamp.errors import wrong_type

SHRINK = 2.0**-90
"""Brings every float32 number below 2**38, so that sums of squares are finite."""


def all_finite(tree: Any, also: Any = True) -> jax.Array:
    """Return whether all arrays of a pytree are finite and ``also`` is true; bool[]."""
    # It does not use the largest absolute value: XLA's maximum on CPUs can lose a NaN among many elements.
    flags = (jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))
    return computed_once(functools.reduce(jnp.logical_and, flags, jnp.asarray(also)))


def computed_once(flag: jax.Array) -> jax.Array:
    """Return a flag unchanged, in such a form that XLA computes it once, not once for each use; bool[]."""
    # XLA copies arithmetic of scalars into every kernel that uses its result, unless it is as expensive as a root. A
    # flag of all gradients is used by the kernels of all parameters: with copies, the program grows by their square.
    return jnp.sqrt(flag.astype(jnp.float32)) == 1


def unscaled(grads: Any, scale: jax.Array) -> Any:
    """Return gradients divided by the loss scale, in float32 or wider."""
    # In two factors: XLA divides by multiplying with the reciprocal, which it flushes to zero for a scale over 2**126.
    first = jnp.where(scale > 1, jnp.float32(0.25), jnp.float32(1))
    second = 1 / (scale * first)
    return jax.tree.map(lambda grad: grad * first * second, widened(grads))


_MADE_AT: dict[int, tuple[weakref.ref[Any], Any]] = {}  # gradients, by id, and the loss scales they were made at


def note_scale(grads: Any, scale: Any) -> None:
    """Remember, as long as gradients live, the loss scale at which they were made."""
    for leaf in jax.tree.leaves(grads):
        if is_traced(leaf) or not is_traced(scale):
            _MADE_AT[id(leaf)] = weakref.ref(leaf, functools.partial(_MADE_AT.pop, id(leaf))), scale


def at_scale(grads: Any, scale: Any) -> Any:
    """Return gradients brought to this loss scale, if `note_scale` noted another for them."""

    def moved(leaf: Any) -> Any:
        _, own = _MADE_AT.get(id(leaf), (None, scale))
        if own is scale or not (is_traced(own) or is_traced(scale) or np.asarray(own) != np.asarray(scale)):
            return leaf
        return widened(leaf) * (scale / own)

    return jax.tree.map(moved, grads)


def clipped(grads: Any, limit: float, axis_name: Hashable | None = None) -> Any:
    """Return gradients scaled down so that their global L2 norm is at most ``limit``; unchanged if the norm is."""
    # The norm is computed in float32 or wider, and does not overflow for any finite gradients.
    norm, shrink = _norm(jax.tree.leaves(widened(grads)), axis_name)
    clips = norm > limit * shrink
    first, second = jnp.where(clips, shrink, 1), jnp.where(clips, limit / norm, 1)
    return jax.tree.map(lambda grad: (grad * first * second).astype(grad.dtype), grads)


def _norm(leaves: list[jax.Array], axis_name: Hashable | None) -> tuple[jax.Array, jax.Array]:
    """Return the global norm of the leaves times a factor, and this factor: 1 unless the sum of squares overflows."""
    # Both norms are computed, in one pass over the leaves. What depends on them lies behind a square root, without
    # which XLA would compute it anew for every parameter: see `computed_once`.
    names = axis_name if isinstance(axis_name, tuple | list) else (axis_name,)
    wide = [jnp.abs(leaf) if jnp.iscomplexobj(leaf) else leaf for leaf in leaves]

    def norm(factor: float) -> jax.Array:
        squares: dict[tuple[Hashable, ...], Any] = {}  # by the axes to sum over: one sum over devices for each of them
        for leaf in wide:
            axes = tuple(name for name in names if name in unstable.varying_axes(leaf))
            squares[axes] = squares.get(axes, jnp.float32(0)) + jnp.square(leaf * factor).sum()
        whole = (
            jax.lax.psum(local, axes) if axes else local  # type: ignore[no-untyped-call]
            for axes, local in squares.items()
        )
        return jnp.sqrt(functools.reduce(jnp.add, whole, jnp.float32(0)))

    plain, shrunk = norm(1.0), norm(SHRINK)
    overflows = jnp.isinf(plain)
    return jnp.where(overflows, shrunk, plain), jnp.where(overflows, SHRINK, 1.0).astype(plain.dtype)


def masters_of(params: Any, *, low: bool = False) -> Any:
    """Return float32 copies of the 16-bit parameters, with None for the others; None if no parameter has 16 bits."""
    masters = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if is_low(leaf) else None, params)
    stands_for_params = low and not jax.tree.leaves(params)
    return masters if jax.tree.leaves(masters) or stands_for_params else None


def followed(masters: Any, params: Any) -> Any:
    """Return master weights, with the parameter's value in elements that the user changed since the last rounding."""

    def follow(master: Any, param: Any) -> Any:
        if master is None or not is_low(param):
            return master
        return jnp.where(master.astype(param.dtype) == param, master, param.astype(master.dtype))

    return map_with_none(follow, masters, params)


def masters_in(full: Any, masters: Any) -> Any:
    """Return ``full`` with None where ``masters`` has None; None if ``masters`` is None."""
    if masters is None:
        return None
    return map_with_none(lambda master, value: None if master is None else value, masters, full)


def updates_to(masters: Any, params: Any, updates: Any) -> Any:
    """Return updates; for a 16-bit parameter, its rounded master minus the parameter, in float32."""

    def update_to(master: Any, param: Any, update: Any) -> Any:
        if master is None:
            return update
        return master.astype(param.dtype).astype(jnp.float32) - param.astype(jnp.float32)

    return jax.tree.map(update_to, masters, params, updates, is_leaf=lambda leaf: leaf is None)


def zero_updates(grads: Any) -> Any:
    """Return updates that change no bit of any parameter: -0.0, since adding +0.0 would turn -0.0 into +0.0."""
    return jax.tree.map(lambda grad: -jnp.zeros_like(grad), widened(grads))


def apply_updates(params: Any, updates: Any) -> Any:
    """Return parameters plus updates, in each parameter's own dtype; a leaf whose update is None is unchanged.

    >>> apply_updates({"w": jnp.ones(1, jnp.float16)}, {"w": jnp.array([0.5])})
    {'w': Array([1.5], dtype=float16)}

    Unlike ``optax.apply_updates`` it accepts None as an update. Unlike ``equinox.apply_updates`` it keeps a 16-bit
    parameter in 16 bits when its update is float32.
    """

    def moved(update: Any, param: Any) -> Any:
        return param if update is None else jnp.add(param, update).astype(param.dtype)

    where, fix = "apply_updates(params, updates)", "pass the updates that tx.update returned for these parameters"
    with fitting(updates, params, where=where, names=("updates", "parameters"), fix=fix):
        return map_with_none(moved, updates, params)


def select(applied: Any, new: Any, old: Any) -> Any:
    """Return ``new`` if the step was applied, else ``old``: for your own state that a skipped step must not change.

    >>> select(jnp.array(False), {"mean": jnp.ones(1)}, {"mean": jnp.zeros(1)})
    {'mean': Array([0.], dtype=float32)}

    Args:
        applied: ``opt_state.last_step.applied``; bool[] or a Python bool.
        new: pytree of arrays after this step, such as batch-norm statistics.
        old: the same before it.
    """
    where = "select(applied, new, old)"
    is_boolean = isinstance(applied, bool) or (is_array(applied) and applied.dtype == bool)
    if not is_boolean or jnp.shape(applied) != ():
        fix = "pass opt_state.last_step.applied"
        raise wrong_type(applied, where=where, allowed="bool[] or a Python bool", fix=fix)
    fix = "pass the same state before and after the step"
    with fitting(new, old, where=where, names=("new values", "old ones"), fix=fix):
        return jax.tree.map(lambda one, other: jnp.where(applied, one, other), new, old)


_PREFIX = "polyamp: gradient of "
SCALE = "polyamp: loss scale"  # the name of the scale that an update divides by
NEXT_SCALE = "polyamp: next loss scale"  # the name of the scale that it returns


def marked_gradients(tree: Any) -> Any:
    """Attach parameters' names to traced gradients, which changes no compiled program; return all gradients."""

    return jax.tree_util.tree_map_with_path(lambda path, leaf: marked(leaf, _PREFIX + name_of(path)), tree)


def marked(array: Any, name: str) -> Any:
    """Return an array with a name attached if it is traced."""
    return checkpoint_name(array, name) if is_traced(array) else array  # type: ignore[no-untyped-call]


def mark_of(name: str) -> str | None:
    """Return the parameter that a name from `marked_gradients` refers to; None for any other name."""
    return name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else None
