"""Optimizers, parameters and steps for the tests of the wrapped optax optimizer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import polyamp
from polyamp.backends.jax import apply_gradients

FLOAT16 = polyamp.policy("mixed_float16", loss_scale=polyamp.LossScale(init=2.0**10, interval=3))
MASK = {"kernel": True, "bias": False, "half": True}
LABELS = {"kernel": "trained", "bias": "other", "half": "trained"}
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1, mask=MASK),
    "bfloat16 moments": optax.adam(0.1, mu_dtype=jnp.bfloat16),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.add_noise(0.1, 0.5, 0), optax.lamb(0.1)),
    "ema": optax.chain(optax.trace(0.9), optax.ema(0.99), optax.scale(-0.1)),
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), every_k_schedule=2),
    "MultiSteps by schedule": optax.MultiSteps(optax.adam(0.1), every_k_schedule=lambda step: 1 + step % 3),
    "masked": optax.masked(optax.adam(0.1), MASK),
    "partition": optax.partition(
        {"trained": optax.rmsprop(0.1, momentum=0.9), "other": optax.set_to_zero()}, param_labels=LABELS
    ),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0.0, 10)),
    "schedule": optax.adam(optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)),
    "schedule_free": optax.contrib.schedule_free_sgd(0.1),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.1), max_consecutive_errors=2),
}
STEPS = ("update", "apply_gradients", "uncompiled")


def params(half: Any = jnp.float16) -> dict[str, jax.Array]:
    return {
        "kernel": jnp.array([[1.0, -0.0, 0.0], [3e38, -2.5, 1e-37]]),
        "bias": jnp.array([0.5]),
        "half": jnp.array([1.0, -0.0, 6e-8], half),
    }


def gradients(seed: int, scale: Any, spoil: float | None = None) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    grads = {k: jnp.asarray(rng.standard_normal(p.shape), p.dtype) * scale.astype(p.dtype) for k, p in params().items()}
    return grads if spoil is None else grads | {"bias": jnp.array([spoil])}


def wrapped_to_step(inner: Any, how: str, policy: Any = FLOAT16, **options: Any) -> tuple[Any, Any]:
    """Return the wrapped optimizer, and ``step(params, opt_state, grads) -> (params, opt_state)`` in one of `STEPS`."""
    tx = polyamp.wrap_optimizer(inner, policy, **options)

    def step(params: Any, opt_state: Any, grads: Any) -> Any:
        if how == "apply_gradients":
            return apply_gradients(tx, grads, opt_state, params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return tx, step if how == "uncompiled" else jax.jit(step)


def bits(tree: Any) -> list[tuple[str, bytes]]:
    leaves = jax.tree.leaves(tree)
    plain = [jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf for leaf in leaves]
    return [(str(leaf.dtype), np.asarray(leaf).tobytes()) for leaf in plain]
