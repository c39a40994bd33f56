"""Equal values are known before a program runs, however they are written."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import polyamp
from support.jax_scenarios import normal, relative_error
from support.jax_scenarios import quickly_compiled as quickly_compiled


def test_equal_values_share_a_cast() -> None:
    def loss(w: Any, x: Any) -> Any:  # the gradients of both halves cancel
        mean, scale = x @ w[0], x @ w[1]
        upper = jax.nn.sigmoid((x - mean + 0.004) * jnp.exp(-scale))
        return -jnp.log(upper - jax.nn.sigmoid((x - mean - 0.004) * jnp.exp(-scale)) + 1e-12).mean()

    w, x = normal(0, 2, 8, 8, scale=0.3), normal(1, 64, 8)
    assert relative_error(jax.grad(polyamp.autocast(loss, "mixed_float16"))(w, x)[1], jax.grad(loss)(w, x)[1]) < 5e-3
