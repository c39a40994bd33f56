"""Calibration of a JAX model whose plain policy fails: rules for one layer, after which it trains as in float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import polyamp
from polyamp import LossScale, Policy
from polyamp.diagnosis.calibrate import Calibration, calibrate

STEPS = 15
Params = dict[str, jax.Array]


def params() -> Params:
    """Return the parameters of a model whose second layer overflows float16."""
    rng = np.random.default_rng(0)
    shapes = {"first": (16, 32, 0.3), "wide": (32, 32, 3000.0), "head": (32, 10, 0.2)}
    return {name: jnp.float32(rng.standard_normal((m, n)) * size) for name, (m, n, size) in shapes.items()}


def loss_fn(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    with jax.named_scope("first"):
        hidden = jax.nn.relu(x @ params["first"])
    with jax.named_scope("wide"):
        hidden = (hidden @ params["wide"]) * 1e-5
    with jax.named_scope("head"):
        logits = hidden @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def batches(count: int) -> list[tuple[jax.Array, jax.Array]]:
    labels = np.random.default_rng(1).integers(0, 10, (count, 8))
    return [(jnp.float32(np.eye(16)[y] * 40), jnp.array(y)) for y in labels]


def calibrated(fn: Any = loss_fn) -> Calibration:
    return calibrate(fn, [(params(), x, y) for x, y in batches(3)], "mixed_float16")


def trained(policy: Policy | str) -> tuple[float, int]:
    """Train; return the last loss and the number of skipped steps."""
    tx = polyamp.wrap_optimizer(optax.adam(1e-2), policy, loss_scale=LossScale.fixed(2.0**8))

    @jax.jit
    def step(weights: Params, opt_state: Any, x: jax.Array, y: jax.Array) -> tuple[Params, Any, jax.Array]:
        cast = polyamp.autocast(loss_fn, policy)
        loss, grads = polyamp.value_and_grad(cast, "float32")(opt_state, weights, x, y)
        updates, opt_state = tx.update(grads, opt_state, weights)
        return optax.apply_updates(weights, updates), opt_state, loss

    weights = params()
    opt_state = tx.init(weights)
    for x, y in batches(STEPS):
        weights, opt_state, loss = step(weights, opt_state, x, y)
    return float(loss), int(opt_state.skipped)


def test_the_plain_policy_fails_and_the_calibrated_one_trains_as_float32() -> None:
    assert trained("mixed_float16")[1] == STEPS
    loss, skipped = trained(calibrated().policy)
    assert skipped == 0
    assert abs(loss - trained("float32")[0]) < 0.01


def test_the_rules_name_that_layer_alone() -> None:
    found = calibrated()
    assert found.rules == {"wide/matmul": "full"}
    (evidence,) = found.evidence
    assert evidence.largest > 65504
    assert evidence.batches == 3
    assert found.is_safe
    assert not found.before.is_safe


def test_a_training_step_is_calibrated_up_to_its_update() -> None:
    tx = polyamp.wrap_optimizer(optax.sgd(0.1), "mixed_float16")

    @jax.jit
    def step(weights: Params, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        loss, grads = polyamp.value_and_grad(polyamp.autocast(loss_fn), "float32")(opt_state, weights, x, y)
        updates, opt_state = tx.update(grads, opt_state, weights)
        return optax.apply_updates(weights, updates), opt_state, loss

    x, y = batches(1)[0]
    found = calibrate(step, [(params(), tx.init(params()), x, y)], "mixed_float16")
    assert found.rules["wide/matmul"] == "full"
