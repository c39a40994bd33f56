"""Skipped steps over several devices, run by test_devices.py in a process that has eight."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import polyamp
from support.jax_cases import bits, wrapped_to_step

COUNT = jax.device_count()
SCALE = 2.0**10
HOW = ["update", "apply_gradients"]


def shards(spoiled: bool) -> jax.Array:
    """Return the gradients of every device, one of which overflows if ``spoiled``; f32[COUNT, 3]."""
    grads = jnp.full((COUNT, 3), SCALE)
    return grads.at[COUNT - 2, 1].set(jnp.inf) if spoiled else grads


def check(held: Any, spoiled: bool) -> None:
    """Assert that every device took adam's first step of 0.1, or that none did."""
    params, opt_state = held
    np.testing.assert_allclose(params, np.full((COUNT, 3), 1.0 if spoiled else 0.9), rtol=1e-4)
    assert (opt_state.loss_scale == (SCALE / 2 if spoiled else SCALE)).all()
    assert (opt_state.skipped == int(spoiled)).all()
    assert (opt_state.inner_state[0].count == int(not spoiled)).all()


def pmapped(how: str, **options: Any) -> tuple[Any, Any]:
    tx, step = wrapped_to_step(optax.adam(0.1), how, **options)
    params = jnp.ones((COUNT, 3))
    return jax.pmap(step, axis_name="data"), (params, jax.pmap(tx.init)(params))


@pytest.mark.parametrize("how", HOW)
def test_pmap(how: str) -> None:
    step, start = pmapped(how, axis_name="data")
    for spoiled in (False, True):
        check(step(*start, shards(spoiled)), spoiled)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("how", HOW)
def test_shard_map_over_the_batch(how: str, check_vma: bool) -> None:
    """Replicated 16-bit parameters with masters: each device differentiates its part; gradients are averaged."""
    tx, step = wrapped_to_step(optax.adam(0.1), how, axis_name="data")
    weights = jnp.ones(3, jnp.float16)
    start = weights, tx.init(weights)

    def train(weights: Any, opt_state: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            return polyamp.scale_loss((x * weights).astype(jnp.float32).mean(), opt_state)

        local = jax.lax.pcast(weights, "data", to="varying") if check_vma else weights
        grads = jax.lax.pmean(jax.grad(loss)(local).astype(jnp.float32), "data")
        return step(weights, opt_state, grads)

    mesh = jax.make_mesh((COUNT,), ("data",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(train, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P(), check_vma=check_vma)
    compiled = jax.jit(mapped)
    for spoiled in (False, True):
        new, state = compiled(*start, (shards(spoiled) / SCALE).astype(jnp.float16))
        assert bool(state.last_step) is not spoiled
        assert (bits((new, state.master_weights)) == bits((weights, start[1].master_weights))) is spoiled
