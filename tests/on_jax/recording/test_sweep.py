"""A sweep of real training runs against the window that one probed step predicts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import polyamp
from polyamp import LossScale

SMALL = 2.0**-20  # of the loss, as the mean over a very large batch makes gradients
STEPS = 20
RNG = np.random.default_rng(0)
X, Y = jnp.float32(RNG.standard_normal((32, 16))), jnp.float32(RNG.standard_normal((32, 4)))
PARAMS = {
    "first": jnp.float32(RNG.standard_normal((16, 32)) * 0.2),
    "second": jnp.float32(RNG.standard_normal((32, 4)) * 0.2),
}


def loss_fn(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    output = jnp.tanh(x @ params["first"]) @ params["second"]
    return jnp.square(output - y).mean() * SMALL


def train(scale: float, policy: str = "mixed_float16") -> tuple[jax.Array, int]:
    """Train; return the last loss, with its factor removed, and the number of skipped steps."""
    tx = polyamp.wrap_optimizer(optax.adam(1e-2, eps=1e-30), policy, loss_scale=LossScale.fixed(scale))

    @jax.jit
    def step(params: Any, opt_state: Any) -> tuple[Any, Any, jax.Array]:
        cast = polyamp.autocast(loss_fn, policy)
        loss, grads = polyamp.value_and_grad(cast, "float32")(opt_state, params, X, Y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss / SMALL

    params, opt_state = PARAMS, tx.init(PARAMS)
    for _ in range(STEPS):
        params, opt_state, loss = step(params, opt_state)
    return loss, int(opt_state.skipped)


def test_scales_inside_of_the_probed_window_reach_float32_and_those_far_outside_do_not() -> None:
    probed = polyamp.probe(loss_fn, PARAMS, X, Y, policy="mixed_float16")
    assert probed.window is not None
    low, high = probed.window
    scales = [low * 2.0**-12, low, probed.recommended.init, high, high * 2.0**12]
    found = polyamp.sweep(train, scales, probe=probed, reference=lambda: train(1.0, "float32"), progress=False)
    assert found.outcomes == ("too small", "ok", "ok", "ok", "too large"), str(found)
    assert not found.unsafe
