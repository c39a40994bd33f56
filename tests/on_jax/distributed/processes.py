"""Two processes of ``jax.distributed`` with two devices each. test_devices.py runs this file in both at once."""

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import polyamp
from polyamp.backends.jax import apply_gradients, check_limits
from support.unlike_ranks import check_that_ranks_choose_the_same

RANK = int(os.environ["POLYAMP_TEST_RANK"])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{os.environ['POLYAMP_TEST_PORT']}", 2, RANK)

MESH = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
WHOLE, BY_ROW = NamedSharding(MESH, P()), NamedSharding(MESH, P("data"))
LAYOUTS = {"w": NamedSharding(MESH, P(None, "model")), "b": WHOLE}
FSDP = {"w": NamedSharding(MESH, P("data", "model")), "b": WHOLE}

Tree = Any


def wrapped(**options: Any) -> Any:
    return polyamp.wrap_optimizer(optax.adam(0.1), "O2", max_grad_norm=1.0, **options)


def loss_fn(params: Tree, x: Any) -> Any:
    return jnp.square(x @ params["w"] + params["b"]).mean()


def init() -> Tree:
    params = {"w": jnp.full((8, 4), 0.5, jnp.float16), "b": jnp.zeros(4)}
    return params, wrapped().init(params)


def layout_of(params: Tree) -> Tree:
    of_state = optax.tree_map_params(
        wrapped(),
        lambda leaf, sharding: leaf if leaf is None else sharding,
        jax.eval_shape(init)[1],
        params,
        transform_non_params=lambda _: WHOLE,
        is_leaf=lambda leaf: leaf is None,
    )
    return params, of_state


def step(held: Tree, x: Any) -> Tree:
    _, grads = polyamp.value_and_grad(loss_fn, "O2")(held[1], held[0], x)
    return apply_gradients(wrapped(), grads, held[1], held[0])


def rows(spoiled: bool) -> np.ndarray:
    """Return the part of this process in a batch; in the second one, the last row overflows if ``spoiled``."""
    x = np.random.default_rng(RANK).standard_normal((4, 8), np.float32)
    x[-1] = np.inf if spoiled and RANK == 1 else x[-1]
    return x


def batch(spoiled: bool = False) -> jax.Array:
    return jax.make_array_from_process_local_data(BY_ROW, rows(spoiled))


def bits(tree: Tree) -> list[bytes]:
    """Return the bits of the parts that this process has."""
    return [np.asarray(shard.data).tobytes() for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]


def kept(held: Tree) -> Tree:
    return held[0], held[1].inner_state, held[1].master_weights


@pytest.mark.parametrize("params", [LAYOUTS, FSDP], ids=["by model", "by data and model"])
def test_an_overflow_in_one_process_skips_the_step_in_both(params: Tree) -> None:
    layout = layout_of(params)
    run = jax.jit(step, out_shardings=layout, donate_argnums=0)
    held = jax.jit(init, out_shardings=layout)()
    for count, spoiled in enumerate((False, True, False), 1):
        before = bits(kept(held))
        held = run(held, batch(spoiled))
        assert bool(check_limits(held)) is not spoiled
        assert (bits(kept(held)) == before) is spoiled
        assert polyamp.save_loss_scale(held)["steps"] == count
    assert polyamp.save_loss_scale(held)["scale"] == 2.0**15
    alone = jax.jit(init)()
    everything = np.concatenate([np.random.default_rng(rank).standard_normal((4, 8), np.float32) for rank in (0, 1)])
    for x in (everything, everything):
        alone = jax.jit(step)(alone, x)
    gathered = jax.jit(lambda params: params, out_shardings=WHOLE)(held[0])
    for name, expected in alone[0].items():
        np.testing.assert_allclose(np.float32(gathered[name].addressable_data(0)), np.float32(expected), rtol=2e-3)


def test_processes_with_unlike_devices_choose_the_same_policy() -> None:
    check_that_ranks_choose_the_same("jax", RANK)


@pytest.mark.filterwarnings("ignore:jax.sharding.PmapSharding is deprecated")  # by pmap itself, in JAX 0.9
def test_pmap_over_both_processes() -> None:
    """Each process sees its own copies of the scale only, and saves and loads it all the same."""
    tx = polyamp.wrap_optimizer(optax.sgd(0.1), "mixed_float16", axis_name="data")

    def update(params: Any, state: Any, grads: Any) -> Any:
        return apply_gradients(tx, grads, state, params)

    params = jnp.ones((2, 3))
    grads = jnp.full((2, 3), jnp.inf if RANK == 1 else 2.0**16)
    _, state = jax.pmap(update, axis_name="data")(params, jax.pmap(tx.init)(params), grads)
    assert not check_limits(state)
    saved = polyamp.save_loss_scale(state)
    assert saved["scale"] == 2.0**15
    loaded = polyamp.load_loss_scale(state, saved | {"scale": 8.0})
    assert polyamp.save_loss_scale(loaded)["scale"] == 8.0
    assert loaded.loss_scale.sharding == state.loss_scale.sharding


def test_a_checkpoint_of_both_processes_continues_to_the_bit() -> None:
    layout = layout_of(FSDP)
    run = jax.jit(step, out_shardings=layout)
    held = jax.jit(init, out_shardings=layout)()
    for spoiled in (False, True):
        held = run(held, batch(spoiled))
    like = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(init),
        layout,
    )
    with ocp.CheckpointManager(Path(os.environ["POLYAMP_TEST_FOLDER"])) as manager:
        manager.save(2, args=ocp.args.StandardSave(held))
        manager.wait_until_finished()
        restored = manager.restore(2, args=ocp.args.StandardRestore(like))
    assert bits(restored) == bits(held)
    assert bits(run(restored, batch())) == bits(run(held, batch()))
