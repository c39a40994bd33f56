"""The interface of jmp, DeepMind's library for mixed precision in JAX, on polyamp's policies and loss-scale rule.

A program needs one other import::

    import polyamp.backends.jax.compat.jmp as jmp

    policy = jmp.get_policy("params=float32,compute=float16,output=float32")
    loss_scale = jmp.DynamicLossScale(jnp.float32(2**15))

It differs from jmp where jmp loses numbers. Losses are scaled and gradients unscaled in float32. ``min_loss_scale``
stays through ``tree_map`` and ``jit``. A float16 scale works, and no scale becomes 0. Each function warns once, with
the line of polyamp that replaces it.
"""

from __future__ import annotations

from typing import Any

import jax

from polyamp.backends.jax.compat.jmp_policies import (
    Policy,
    cast_to_full,
    cast_to_half,
    get_policy,
    half_dtype,
)
from polyamp.backends.jax.compat.jmp_policies import (
    dtype_to_names as dtype_to_names,  # jmp has it in its policy module
)
from polyamp.backends.jax.compat.jmp_scales import (
    DynamicLossScale,
    NoOpLossScale,
    StaticLossScale,
    check_scalar,
)
from polyamp.backends.jax.compat.structure import replaced
from polyamp.backends.jax.steps import gradients

__all__ = (
    "DynamicLossScale",
    "LossScale",
    "NoOpLossScale",
    "Policy",
    "StaticLossScale",
    "all_finite",
    "cast_to_full",
    "cast_to_half",
    "get_policy",
    "half_dtype",
    "select_tree",
)

LossScale = NoOpLossScale | StaticLossScale | DynamicLossScale


def all_finite(tree: Any) -> jax.Array:
    """Return whether all arrays of a pytree are finite; bool[].

    >>> import jax.numpy as jnp
    >>> bool(all_finite({"w": jnp.array([1.0, jnp.inf])}))
    False
    """
    replaced("jmp.all_finite(grads)", "opt_state.last_step.applied, after tx.update of a wrapped optimizer")
    return gradients.all_finite(tree)


def select_tree(pred: Any, a: Any, b: Any) -> Any:
    """Return ``a`` where ``pred`` is true, else ``b``; pytrees of arrays with the same shapes and dtypes.

    >>> import jax.numpy as jnp
    >>> select_tree(jnp.bool_(False), {"w": jnp.ones(1)}, {"w": jnp.zeros(1)})
    {'w': Array([0.], dtype=float32)}

    Raises:
        InvalidTypeError: ``pred`` is not a boolean scalar.
    """
    replaced("jmp.select_tree(pred, a, b)", "polyamp.backends.jax.select(opt_state.last_step.applied, a, b)")
    check_scalar(pred, where="jmp.select_tree(pred, a, b)", is_boolean=True)
    return jax.tree.map(lambda one, other: jax.lax.select(pred, one, other), a, b)
