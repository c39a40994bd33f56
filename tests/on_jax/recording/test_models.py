"""Recording steps of the libraries that models are written in."""

from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import polyamp
from polyamp.backends.jax import adapter
from polyamp.diagnosis.recording import ACTIVATION, GRADIENT, PARAMETER, Recording
from support.jax_scenarios import normal
from support.jax_scenarios import quickly_compiled as quickly_compiled

pytestmark = pytest.mark.slow

FLOAT16 = polyamp.policy("mixed_float16")
X, Y, KEY = normal(0, 6, 8), normal(1, 6, 3), jax.random.key(0)


def record(step: Any, *args: Any, **options: Any) -> Recording:
    return adapter.record(step, args, {}, FLOAT16, **{"widened": True, **options})


def places(recording: Recording, *kinds: str) -> list[str]:
    return [one.place for one in recording.of_kind(*kinds)]


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(3, name="head")(nn.relu(nn.Dense(4, name="first")(x)))


def test_flax_linen_modules_are_places_and_a_train_state_names_its_gradients() -> None:
    model = Linen()
    tx = polyamp.wrap_optimizer(optax.adam(1e-3), FLOAT16)
    state = TrainState.create(apply_fn=model.apply, params=model.init(KEY, X)["params"], tx=tx)

    @jax.jit
    def step(state: TrainState, x: jax.Array, y: jax.Array) -> Any:
        def loss_fn(params: Any, x: jax.Array) -> jax.Array:
            return optax.l2_loss(state.apply_fn({"params": params}, x), y).mean()

        loss, grads = polyamp.value_and_grad(loss_fn, FLOAT16)(state.opt_state, state.params, x)
        return state.apply_gradients(grads=grads), {"loss": loss}

    recording = record(step, state, X, Y)
    assert "Linen/first/matmul" in places(recording, ACTIVATION)
    assert places(recording, PARAMETER) == ["first/bias", "first/kernel", "head/bias", "head/kernel"]
    assert (recording.scale, recording.differentiates) == (65536.0, True)
    assert recording.loss is not None


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(8, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.dropout(self.norm(self.first(x))))


def nnx_loss(model: Nnx, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.square(model(x) - y).mean()


def leaves(module: Any) -> list[np.ndarray]:
    state = jax.tree.leaves(nnx.state(module))
    return [np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in state]


def test_an_nnx_module_is_differentiated_and_left_as_it_was() -> None:
    model = Nnx(nnx.Rngs(0))
    before = leaves(model)
    recording = record(nnx_loss, model, X, Y)
    assert all(map(np.array_equal, leaves(model), before))
    assert set(places(recording, PARAMETER)) == {
        "first/bias",
        "first/kernel",
        "head/bias",
        "head/kernel",
        "norm/bias",
        "norm/scale",
    }
    assert "matmul" in {one.name for one in recording.of_kind(GRADIENT)}


@pytest.mark.parametrize("jitted", [True, False])
def test_an_nnx_step_that_updates_in_place_is_recorded_and_undone(jitted: bool) -> None:
    model = Nnx(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, polyamp.wrap_optimizer(optax.adam(1e-3), FLOAT16), wrt=nnx.Param)

    def step(model: Nnx, optimizer: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        loss, grads = polyamp.value_and_grad(nnx_loss, FLOAT16)(optimizer, model, x, y)
        optimizer.update(model, grads)
        return loss

    before = leaves((model, optimizer))
    recording = record(nnx.jit(step) if jitted else step, model, optimizer, X, Y)
    assert all(map(np.array_equal, leaves((model, optimizer)), before))
    assert recording.differentiates
    assert recording.scale == 65536.0
    assert recording.loss is not None
    assert "head/kernel" in places(recording, PARAMETER)


def test_an_equinox_module_is_differentiated() -> None:
    model = eqx.nn.MLP(8, 3, 4, 1, key=KEY)
    recording = record(lambda model, x, y: jnp.square(jax.vmap(model)(x) - y).mean(), model, X, Y)
    assert places(recording, PARAMETER) == [f"layers/{i}/{part}" for i in (0, 1) for part in ("weight", "bias")]


def test_every_device_of_a_mapped_step_is_looked_at() -> None:
    tx = polyamp.wrap_optimizer(optax.sgd(0.1), FLOAT16, axis_name="data")
    mesh = Mesh(np.array(jax.devices()), ("data",))
    params = {"w": normal(0, 8, 3)}

    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.square(x @ params["w"] - y).mean()

    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        loss, grads = polyamp.value_and_grad(loss_fn, FLOAT16)(opt_state, params, x, y)
        grads = jax.lax.pmean(grads, "data")
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, jax.lax.pmean(loss, "data")

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("data"), P("data")), out_specs=P(), check_vma=False)
    recording = record(jax.jit(mapped), params, tx.init(params), X, Y)
    (product,) = (one for one in recording.of_kind(ACTIVATION) if one.name == "matmul")
    assert product.spread.elements == 6 * 3
    assert places(recording, PARAMETER) == ["w"]


def test_haiku_modules_are_places() -> None:
    net = hk.transform(lambda x: hk.nets.MLP([4, 3])(x))
    recording = record(lambda params, x: jnp.square(net.apply(params, None, x)).mean(), net.init(KEY, X), X)
    products = [one for one in recording.of_kind(ACTIVATION) if one.name == "matmul"]
    assert [one.where for one in products] == ["mlp/linear_0", "mlp/linear_1"]
    assert next(recording.of_kind(PARAMETER)).name == "mlp/~/linear_0/b"
