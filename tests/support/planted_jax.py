"""Small trainings in JAX that a policy, a loss scale or an optimizer can damage; see ``planted_torch.py``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import polyamp
from polyamp import controls
from polyamp.backends.jax.dtypes import dtype_of
from polyamp.diagnosis.calibrate import Calibration
from support.planted import FITTING, HIDDEN, OVERFLOWING, RATE, digits, rows_of

Params = dict[str, Any]


def log_probabilities(params: Params, x: jax.Array) -> jax.Array:
    with jax.named_scope("first"):
        x = x @ params["first"] + params["first_bias"]
    with jax.named_scope("norm"):
        centred = x - x.mean(-1, keepdims=True)
        x = centred / jnp.sqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)
    x = jax.nn.relu(x) @ params["second"] + params["second_bias"]
    with jax.named_scope("probabilities"):
        return jnp.log(jax.nn.softmax(x) + 1e-12)


def loss_of(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(log_probabilities(params, x), y[:, None], -1).mean()


def sgd(policy: polyamp.Policy) -> Any:
    return optax.sgd(RATE, momentum=0.9)


def adam(policy: polyamp.Policy) -> Any:
    """Adam with second moments in the compute format: where those underflow, nothing but its epsilon is left."""
    inner, dtype = optax.adam(RATE / 40), dtype_of(policy.compute)

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        updates, state = inner.update(grads, state, params)
        stored = jax.tree.map(lambda leaf: leaf.astype(dtype).astype(leaf.dtype), optax.tree.get(state, "nu"))
        return updates, optax.tree.set(state, nu=jax.lax.optimization_barrier(stored))

    return optax.GradientTransformation(inner.init, update)


def classify(
    policy: polyamp.Policy, seed: int, make: Callable[..., Any] = sgd, largest: float = FITTING
) -> dict[str, float]:
    compiled = _compiled(policy, make, largest, controls.active())
    return {"loss": float(compiled(start(seed), rows_of(seed)))}


def classify_with_adam(policy: polyamp.Policy, seed: int) -> dict[str, float]:
    return classify(policy, seed, make=adam)


def classify_overflowing(policy: polyamp.Policy, seed: int) -> dict[str, float]:
    return classify(policy, seed, largest=OVERFLOWING)


def calibrated() -> Calibration:
    """Return what `polyamp.calibrate` finds for a fresh network on two batches whose values float16 does not hold."""
    x, y, *_ = map(jnp.asarray, digits(OVERFLOWING))
    batches = [(start(100), x[rows], y[rows]) for rows in rows_of(100)[:2]]
    return polyamp.calibrate(loss_of, batches, "mixed_float16")


def start(seed: int) -> Params:
    rng = np.random.default_rng(seed)
    sizes = {"first": (64, HIDDEN), "second": (HIDDEN, 10)}
    weights = {name: rng.uniform(-1, 1, shape) / shape[0] ** 0.5 for name, shape in sizes.items()}
    biases = {f"{name}_bias": np.zeros(shape[1]) for name, shape in sizes.items()}
    return {name: jnp.asarray(array, jnp.float32) for name, array in (weights | biases).items()}


@functools.cache
def _compiled(
    policy: polyamp.Policy, make: Callable[..., Any], largest: float, control: controls.Control | None
) -> Any:
    """Return a whole training with its evaluation, compiled once for all seeds."""
    x, y, test_x, test_y = map(jnp.asarray, digits(largest))
    tx = polyamp.wrap_optimizer(make(policy), policy)

    def step(carry: Any, rows: jax.Array) -> Any:
        params, state = carry
        _, grads = polyamp.value_and_grad(loss_of, policy)(state, params, x[rows], y[rows])
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    def run(params: Params, rows: jax.Array) -> jax.Array:
        (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), rows)
        return polyamp.autocast(loss_of, policy)(params, test_x, test_y)

    return jax.jit(run)
