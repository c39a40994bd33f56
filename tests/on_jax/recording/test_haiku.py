"""Recording haiku's functions. Needs dm-haiku."""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp

import polyamp
from polyamp.backends.jax import adapter
from polyamp.diagnosis.recording import ACTIVATION, PARAMETER
from support.jax_scenarios import normal
from support.jax_scenarios import quickly_compiled as quickly_compiled


def test_modules_are_places() -> None:
    x = normal(0, 6, 8)
    net = hk.transform(lambda x: hk.nets.MLP([4, 3])(x))
    params = net.init(jax.random.key(0), x)

    def loss_fn(params: hk.Params, x: jax.Array) -> jax.Array:
        return jnp.square(net.apply(params, None, x)).mean()

    recording = adapter.record(loss_fn, (params, x), {}, polyamp.policy("mixed_float16"), widened=True)
    products = [one for one in recording.of_kind(ACTIVATION) if one.name == "matmul"]
    assert [one.where for one in products] == ["mlp/linear_0", "mlp/linear_1"]
    assert next(recording.of_kind(PARAMETER)).name == "mlp/~/linear_0/b"
