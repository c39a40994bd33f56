"""Tests of mapped axes, run by test_jax_devices.py in a process of their own that has four devices."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import polyamp
from polyamp.backends.jax import apply_gradients

SCALE = 2.0**10
POLICY = polyamp.policy("mixed_float16", loss_scale=polyamp.LossScale(init=SCALE))


def wrapped(**options: Any) -> Any:
    return polyamp.wrap_optimizer(optax.adam(0.1), POLICY, **options)


def shards(spoiled: bool) -> jax.Array:
    """Gradients of four devices, of which one overflows where ``spoiled``; f32[4, 3]."""
    grads = jnp.full((4, 3), SCALE)
    return grads.at[2, 1].set(jnp.inf) if spoiled else grads


def run_pmap(tx: Any, grads: jax.Array, params: jax.Array, opt_state: Any) -> Any:
    def step(params: Any, opt_state: Any, grad: Any) -> Any:
        updates, opt_state = tx.update(grad, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    scalars_and_shards = jax.tree.map(lambda leaf: leaf if leaf.ndim else jnp.stack([leaf] * 4), opt_state)
    params, opt_state = jax.pmap(step, axis_name="data")(params, scalars_and_shards, grads)
    return params, jax.tree.map(lambda leaf: leaf if leaf.ndim > 1 else leaf[0], opt_state)


def run_shard_map(tx: Any, grads: jax.Array, params: jax.Array, opt_state: Any, *, check_vma: bool, fused: bool) -> Any:
    def step(params: Any, opt_state: Any, grads: Any) -> Any:
        if fused:
            return apply_gradients(tx, grads, opt_state, params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    layout = jax.tree.map(lambda leaf: P("data") if leaf.ndim else P(), (params, opt_state))
    mesh = Mesh(np.array(jax.devices()), ("data",))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(*layout, P("data")), out_specs=layout, check_vma=check_vma)
    return jax.jit(mapped)(params, opt_state, grads)


RUNS = {"pmap": run_pmap} | {
    f"shard_map check_vma={vma} fused={fused}": functools.partial(run_shard_map, check_vma=vma, fused=fused)
    for vma in (True, False)
    for fused in (True, False)
}


@pytest.fixture
def start() -> tuple[Any, jax.Array, Any]:
    tx, params = wrapped(axis_name="data"), jnp.ones((4, 3))
    return tx, params, tx.init(params)


@pytest.mark.parametrize("run", RUNS)
def test_overflow_on_one_device_skips_on_all(run: str, start: Any) -> None:
    tx, params, opt_state = start
    new_params, new_state = RUNS[run](tx, shards(spoiled=True), params, opt_state)
    np.testing.assert_array_equal(new_params, np.ones((4, 3)))
    assert (new_state.loss_scale, new_state.skipped) == (SCALE / 2, 1)


@pytest.mark.parametrize("run", RUNS)
def test_finite_gradients_step_on_all(run: str, start: Any) -> None:
    tx, params, opt_state = start
    new_params, new_state = RUNS[run](tx, shards(spoiled=False), params, opt_state)
    np.testing.assert_allclose(new_params, np.full((4, 3), 0.9), rtol=1e-4)
    assert (new_state.loss_scale, new_state.skipped) == (SCALE, 0)


def test_without_axis_name_devices_would_part(start: Any) -> None:
    _, params, _ = start
    tx = wrapped()
    new_params, _ = run_pmap(tx, shards(spoiled=True), params, tx.init(params))
    assert (np.asarray(new_params)[:, 0] == 1).tolist() == [False, False, True, False]


def test_replicated_state_is_saved_and_loaded(start: Any) -> None:
    tx, params, opt_state = start
    _, new_state = RUNS["pmap"](tx, shards(spoiled=True), params, opt_state)
    replicated = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), new_state)
    saved = polyamp.save_loss_scale(replicated)
    assert saved["scale"] == SCALE / 2
    loaded = polyamp.load_loss_scale(replicated, saved | {"scale": 8.0})
    np.testing.assert_array_equal(loaded.loss_scale, np.full(4, 8.0))


@pytest.mark.parametrize("spoiled", [False, True])
def test_sharded_parameters_under_jit_need_no_axis_name(spoiled: bool) -> None:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharding = NamedSharding(mesh, P("data"))
    tx, params = wrapped(), jax.device_put(jnp.ones((4, 3)), sharding)
    opt_state = jax.jit(tx.init)(params)
    grads = jax.device_put(shards(spoiled), sharding)
    new_params, new_state = jax.jit(lambda *args: apply_gradients(tx, *args))(grads, opt_state, params)
    assert bool(new_state.last_step) is not spoiled
    assert new_params.sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_allclose(new_params, np.full((4, 3), 1.0 if spoiled else 0.9), rtol=1e-4)
