"""Real training loops: flax linen with a TrainState, flax NNX in both styles, equinox."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import polyamp
from polyamp.backends.jax import apply_gradients, check_limits
from support.jax_scenarios import quickly_compiled as quickly_compiled

pytestmark = pytest.mark.slow

POLICY = polyamp.policy("mixed_float16", loss_scale=polyamp.LossScale(init=2.0**12))
TX = polyamp.wrap_optimizer(optax.adam(0.03), POLICY, max_grad_norm=10.0)
X = jax.random.normal(jax.random.key(0), (64, 3))
Y = X @ jnp.array([[1.0], [-2.0], [0.5]])
SPOILED = X.at[0, 0].set(jnp.inf)


def mean_square(scores: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.square(scores.astype(jnp.float32) - y.astype(jnp.float32)).mean()


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(1)(linen.relu(linen.Dense(16)(x)))


class Nnx(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.norm = nnx.Linear(3, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
        self.drop, self.last = nnx.Dropout(0.0, rngs=rngs), nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.drop(nnx.relu(self.norm(self.first(x)))))


def cast(tree: Any, dtype: Any) -> Any:
    return polyamp.backends.jax.cast(tree, jnp.dtype(dtype).name)


# Each kind of loop returns a compiled ``step(held, x, y) -> (loss, held)``, what it starts with, and a function that
# returns what a skipped step must not touch.


def linen_loop(stored: Any) -> Any:
    model = Linen()
    start = TrainState.create(apply_fn=model.apply, params=cast(model.init(jax.random.key(1), X), stored), tx=TX)

    @jax.jit
    def step(held: TrainState, x: Any, y: Any) -> Any:
        def loss_fn(params: Any, x: Any, y: Any) -> jax.Array:
            return mean_square(held.apply_fn(params, x), y)

        loss, grads = polyamp.value_and_grad(loss_fn, POLICY)(held, held.params, x, y)
        return loss, held.apply_gradients(grads=grads)

    return step, start, lambda held: held.params


def nnx_loop(stored: Any) -> Any:
    model = Nnx()
    nnx.update(model, cast(nnx.state(model, nnx.Param), stored))

    @nnx.jit
    def change(model: Nnx, optimizer: Any, x: Any, y: Any) -> Any:
        def loss_fn(model: Nnx, x: Any, y: Any) -> jax.Array:
            return mean_square(model(x), y)

        loss, grads = polyamp.value_and_grad(loss_fn, POLICY)(optimizer, model, x, y)
        optimizer.update(model, grads)
        return loss

    start = model, nnx.Optimizer(model, TX, wrt=nnx.Param)
    return lambda held, x, y: (change(*held, x, y), held), start, lambda held: nnx.state(held[0], nnx.Param)


def equinox_loop(stored: Any) -> Any:
    model = cast(eqx.nn.MLP(3, 1, 16, 1, key=jax.random.key(2)), stored)

    @eqx.filter_jit
    def step(held: Any, x: Any, y: Any) -> Any:
        def loss_fn(model: Any, x: Any, y: Any) -> jax.Array:
            return mean_square(jax.vmap(model)(x), y)

        loss, grads = polyamp.value_and_grad(loss_fn, POLICY)(held[1], held[0], x, y)
        return loss, apply_gradients(TX, grads, held[1], held[0])

    return step, (model, TX.init(model)), lambda held: eqx.filter(held[0], eqx.is_array)


@pytest.mark.parametrize("stored", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("loop", [linen_loop, nnx_loop, equinox_loop])
def test_training_learns_and_a_skip_touches_nothing(loop: Any, stored: Any) -> None:
    step, held, arrays = loop(stored)
    stored = [leaf.dtype for leaf in jax.tree.leaves(arrays(held))]
    losses = []
    for _ in range(100):
        loss, held = step(held, X, Y)
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 10
    assert [leaf.dtype for leaf in jax.tree.leaves(arrays(held))] == stored
    before = jax.tree.map(np.array, arrays(held))
    _, held = step(held, SPOILED, Y)
    assert not check_limits(held).applied
    same = jax.tree.map(np.array_equal, before, jax.tree.map(np.array, arrays(held)))
    assert all(jax.tree.leaves(same))
    saved = polyamp.save_loss_scale(held)
    assert (saved["scale"], saved["skipped"]) == (2.0**11, 1)
    _, held = step(polyamp.load_loss_scale(held, saved | {"scale": 16.0, "skipped": 7}), SPOILED, Y)
    saved = polyamp.save_loss_scale(held)
    assert (saved["scale"], saved["skipped"]) == (8.0, 8)
