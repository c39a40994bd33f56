"""Update or skip: apply updates, or change nothing. Pure functions, for use inside and outside ``jit``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from polyamp.backends.jax.casting import widened
from polyamp.backends.jax.trees import map_with_none


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
    return map_with_none(
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
