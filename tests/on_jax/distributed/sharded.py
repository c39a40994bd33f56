"""Training over a mesh of data and model axes, run by test_devices.py in a process with eight devices."""

import re
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import polyamp
from polyamp.backends.jax import apply_gradients
from support.jax_cases import bits

POLICIES = {jnp.float32: "mixed_float16", jnp.float16: "O2"}
SPECS = {"w": P("data", "model"), "b": P("model")}
X = np.random.default_rng(0).standard_normal((16, 8), np.float32)
OVERFLOWING = np.where(np.arange(16)[:, None] == 13, np.float32(np.inf), X)  # in the part of one device


def mesh_of(count: int = 8, kind: AxisType = AxisType.Auto) -> Mesh:
    shape = (max(count // 2, 1), min(count, 2))
    return jax.make_mesh(shape, ("data", "model"), axis_types=(kind,) * 2, devices=jax.devices()[:count])


class Run:
    """One model on one mesh: its state's layout, and a compiled step that keeps it and takes the state's buffers."""

    def __init__(self, mesh: Mesh, dtype: Any = jnp.float32) -> None:
        self.mesh, self.policy, self.dtype = mesh, POLICIES[dtype], dtype
        self.tx = polyamp.wrap_optimizer(optax.adamw(0.1), self.policy, max_grad_norm=1.0)
        of_params = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
        self.abstract = jax.eval_shape(self._init)
        of_state = optax.tree_map_params(
            self.tx,
            lambda _, sharding: sharding,
            self.abstract[1],
            of_params,
            transform_non_params=lambda _: NamedSharding(mesh, P()),
        )
        self.layout = of_params, of_state
        self.init = jax.jit(self._init, out_shardings=self.layout)
        self._step = jax.jit(self._unjitted, donate_argnums=0, out_shardings=self.layout)

    def _init(self) -> Any:
        params = {"w": jnp.full((8, 4), 0.5, self.dtype), "b": jnp.zeros(4, self.dtype)}
        return params, self.tx.init(params)

    def _unjitted(self, held: Any, x: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            return jnp.square(x @ params["w"] + params["b"]).mean()

        _, grads = polyamp.value_and_grad(loss, self.policy)(held[1], held[0], x)
        return apply_gradients(self.tx, grads, held[1], held[0])

    def step(self, held: Any, x: Any) -> Any:
        return self._step(held, jax.device_put(x, NamedSharding(self.mesh, P("data"))))

    def described(self) -> Any:
        """Return the state's shapes, dtypes and shardings, as orbax restores into them."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            self.abstract,
            self.layout,
        )


def specs(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding.spec, tree)


@pytest.fixture(scope="module", params=POLICIES, ids=str)
def run(request: pytest.FixtureRequest) -> Run:
    return Run(mesh_of(), request.param)


# Where the state is.


def test_moments_and_masters_lie_where_their_parameters_do(run: Run) -> None:
    held = run.init()
    for state in (held[1], run.step(held, X)[1]):
        adam = state.inner_state[0]
        assert specs((adam.mu, adam.nu)) == (SPECS, SPECS)
        assert specs(state.master_weights) == (SPECS if run.dtype == jnp.float16 else None)
        assert all(scalar.is_fully_replicated for scalar in state.scalars)


@pytest.mark.parametrize("dtype", POLICIES, ids=str)
def test_a_mesh_with_explicit_shardings_needs_no_layout(dtype: Any) -> None:
    mesh = mesh_of(kind=AxisType.Explicit)
    tx = polyamp.wrap_optimizer(optax.adam(0.1), POLICIES[dtype], max_grad_norm=1.0)
    with jax.set_mesh(mesh):
        params = jax.device_put({"w": jnp.ones((8, 4), dtype)}, {"w": NamedSharding(mesh, P("data", "model"))})
        state = jax.jit(tx.init)(params)
        grads = jax.tree.map(lambda param: param * 2.0**10, params)
        new, after = jax.jit(lambda *args: apply_gradients(tx, *args))(grads, state, params)
    assert after.last_step
    for tree in (new, state.inner_state[0].mu, after.inner_state[0].nu):
        assert tree["w"].sharding.spec == P("data", "model")
    if dtype == jnp.float16:
        assert after.master_weights["w"].sharding.spec == P("data", "model")


def test_shardings_of_nnx_reach_the_masters() -> None:
    kernel_init = nnx.with_partitioning(nnx.initializers.ones, ("data", "model"))
    tx = polyamp.wrap_optimizer(optax.adam(0.1), "bfloat16")

    @nnx.jit
    def made() -> Any:
        model = nnx.Linear(8, 4, kernel_init=kernel_init, param_dtype=jnp.bfloat16, use_bias=False, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        state = nnx.state((model, optimizer))
        nnx.update((model, optimizer), jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
        return model, optimizer

    with jax.set_mesh(mesh_of()):
        _, optimizer = made()
    state = optimizer.opt_state
    assert state.master_weights["kernel"].sharding.spec == P("data", "model")
    named = nnx.get_named_sharding(nnx.state(optimizer), mesh_of())["opt_state"]
    assert named["master_weights"]["kernel"].get_value().spec == P("data", "model")
    assert named["loss_scale"].get_value().spec == P()


# What a step does.


def test_a_sharded_step_is_that_of_one_device_and_skips_as_it_does(run: Run) -> None:
    alone = Run(mesh_of(1), run.dtype)
    held, other = run.init(), alone.init()
    for x in (X, OVERFLOWING, X):
        before = bits((held[0], held[1].inner_state, held[1].master_weights))
        held, other = run.step(held, x), alone.step(other, x)
        assert bool(held[1].last_step) is (x is X) is bool(other[1].last_step)
        assert (bits((held[0], held[1].inner_state, held[1].master_weights)) == before) is (x is not X)
    for one, same in zip(jax.tree.leaves(held), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(np.float32(one), np.float32(same), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("how", "axes"), [("update", "data"), ("apply_gradients", ("data", "model"))])
def test_the_clipped_norm_is_that_of_all_shards(how: str, axes: Any) -> None:
    """Some gradients are split, some whole: each shard counts once, and each whole one too."""
    mesh = mesh_of()
    tx = polyamp.wrap_optimizer(
        optax.sgd(1.0), "mixed_float16", max_grad_norm=1.0, axis_name=axes, loss_scale=polyamp.LossScale.fixed(4.0)
    )
    params = {"split": jnp.zeros((8, 2)), "whole": jnp.zeros(2)}
    grads = {"split": jnp.arange(16.0).reshape(8, 2), "whole": jnp.full(2, 7.0)}
    layout = {"split": P(axes), "whole": P()}

    def step(params: Any, state: Any, grads: Any) -> Any:
        if how == "apply_gradients":
            return apply_gradients(tx, grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(layout, P(), layout), out_specs=(layout, P()))
    new, _ = jax.jit(mapped)(params, tx.init(params), grads)
    alone, _ = jax.jit(step_alone)(params, grads)
    np.testing.assert_allclose(optax.tree.norm(new), 1.0, rtol=1e-6)
    for name in params:
        np.testing.assert_allclose(new[name], alone[name], rtol=1e-6)


def test_the_sums_over_devices_do_not_grow_with_the_parameters() -> None:
    tx = polyamp.wrap_optimizer(optax.sgd(1.0), "mixed_float16", max_grad_norm=1.0, axis_name="data")

    def step(params: Any, state: Any, grads: Any) -> Any:
        return apply_gradients(tx, grads, state, params)

    def sums(count: int) -> int:
        params = {"split": [jnp.zeros((8, 2))] * count, "whole": [jnp.zeros(2)] * count}
        layout = {"split": P("data"), "whole": P()}
        mapped = jax.shard_map(step, mesh=mesh_of(), in_specs=(layout, P(), layout), out_specs=(layout, P()))
        return str(jax.make_jaxpr(mapped)(params, tx.init(params), params)).count("psum")

    assert 0 < sums(2) == sums(20)


def step_alone(params: Any, grads: Any) -> Any:
    tx = polyamp.wrap_optimizer(
        optax.sgd(1.0), "mixed_float16", max_grad_norm=1.0, loss_scale=polyamp.LossScale.fixed(4.0)
    )
    return apply_gradients(tx, grads, tx.init(params), params)


# Checkpoints.


def test_a_checkpoint_continues_on_fewer_devices_to_the_bit(run: Run, tmp_path: Path) -> None:
    held = run.init()
    for x in (X, OVERFLOWING, X):
        held = run.step(held, x)
    saved = bits(held)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, args=ocp.args.StandardSave(held))  # in the background, while the next step takes the buffers
        after = bits(run.step(held, X))
        manager.wait_until_finished()
        for count in (8, 4, 1):
            other = run if count == 8 else Run(mesh_of(count), run.dtype)
            restored = manager.restore(3, args=ocp.args.StandardRestore(other.described()))
            assert bits(restored) == saved
            assert type(restored[1]) is type(other.init()[1])
            assert specs(restored) == jax.tree.map(lambda sharding: sharding.spec, other.layout)
            if count == 8:
                assert bits(run.step(restored, X)) == after


def test_the_page_about_many_devices_runs() -> None:
    """The products of its decoder are in float16, forward and backward: its layers are under scan and remat."""
    page = Path(__file__).parents[3] / "docs/guides/jax_at_scale.md"
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(code, page.name, "exec"), namespace)
    assert namespace["loss"] < 1.0 < np.log(namespace["VOCABULARY"])
    params, opt_state = namespace["layout"]
    assert opt_state.inner_state[0].mu == params
    assert any(sharding.spec == P("data", "model") for sharding in jax.tree.leaves(params))
    program = str(jax.make_jaxpr(namespace["step"])(nn.unbox(namespace["abstract"]), namespace["batch"](0)))
    products = re.findall(r":(\w+)\[[^\]]*\] = dot_general", program)
    assert len(products) > 20
    assert set(products) == {"f16"}
