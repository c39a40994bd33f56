"""Real training loops: flax linen with a TrainState, flax NNX in both styles, equinox, a plain pytree."""

from __future__ import annotations

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
from polyamp.backends.jax import apply_gradients, check_limits, select

pytestmark = pytest.mark.slow

POLICY = polyamp.policy("mixed_float16", loss_scale=polyamp.LossScale(init=2.0**12))
TX = polyamp.wrap_optimizer(optax.adam(0.03), POLICY, max_grad_norm=10.0)
SELECTING = polyamp.wrap_optimizer(optax.adam(0.03), POLICY, max_grad_norm=10.0, skip="select")
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


# Each trainer has ``step``, which returns the loss; ``state``, which holds the loss scale; and ``arrays``, which
# returns what a skipped step must not touch.


class LinenTrainer:
    def __init__(self, tx: Any = TX, stored: Any = jnp.float32) -> None:
        model = Linen()
        params = cast(model.init(jax.random.key(1), X), stored)
        self.state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

        @jax.jit
        def step(state: TrainState, x: Any, y: Any) -> Any:
            def loss_fn(params: Any, x: Any, y: Any) -> jax.Array:
                return mean_square(state.apply_fn(params, x), y)

            loss, grads = polyamp.value_and_grad(loss_fn, POLICY)(state, state.params, x, y)
            return loss, state.apply_gradients(grads=grads)

        self._step = step

    def step(self, x: Any, y: Any) -> Any:
        loss, self.state = self._step(self.state, x, y)
        return loss

    def arrays(self) -> Any:
        return self.state.params


class NnxTrainer:
    def __init__(self, tx: Any = TX, stored: Any = jnp.float32) -> None:
        self.model = Nnx()
        nnx.update(self.model, cast(nnx.state(self.model, nnx.Param), stored))
        self.state = nnx.Optimizer(self.model, tx, wrt=nnx.Param)

        @nnx.jit
        def step(model: Nnx, optimizer: Any, x: Any, y: Any) -> Any:
            def loss_fn(model: Nnx, x: Any, y: Any) -> jax.Array:
                return mean_square(model(x), y)

            loss, grads = polyamp.value_and_grad(loss_fn, POLICY)(optimizer, model, x, y)
            optimizer.update(model, grads)
            return loss

        self._step = step

    def step(self, x: Any, y: Any) -> Any:
        return self._step(self.model, self.state, x, y)

    def arrays(self) -> Any:
        return nnx.state(self.model, nnx.Param)


class NnxSplitTrainer:
    def __init__(self, tx: Any = TX, stored: Any = jnp.float32) -> None:
        definition, params, self.others = nnx.split(Nnx(), nnx.Param, ...)
        self.params = cast(params, stored)
        self.state = tx.init(self.params)

        @jax.jit
        def step(params: Any, others: Any, opt_state: Any, x: Any, y: Any) -> Any:
            def loss_fn(params: Any, x: Any, y: Any) -> Any:
                model = nnx.merge(definition, params, others, copy=True)
                return mean_square(model(x), y), nnx.state(model, nnx.Not(nnx.Param))

            (loss, new), grads = polyamp.value_and_grad(loss_fn, POLICY, has_aux=True)(opt_state, params, x, y)
            params, opt_state = apply_gradients(tx, grads, opt_state, params)
            return loss, params, select(opt_state.last_step.applied, new, others), opt_state

        self._step = step

    def step(self, x: Any, y: Any) -> Any:
        loss, self.params, self.others, self.state = self._step(self.params, self.others, self.state, x, y)
        return loss

    def arrays(self) -> Any:
        return self.params, nnx.filter_state(self.others, nnx.BatchStat)


class EquinoxTrainer:
    def __init__(self, tx: Any = TX, stored: Any = jnp.float32) -> None:
        self.model = cast(eqx.nn.MLP(3, 1, 16, 1, key=jax.random.key(2)), stored)
        self.state = tx.init(self.model)

        @eqx.filter_jit
        def step(model: Any, opt_state: Any, x: Any, y: Any) -> Any:
            def loss_fn(model: Any, x: Any, y: Any) -> jax.Array:
                return mean_square(jax.vmap(model)(x), y)

            loss, grads = polyamp.value_and_grad(loss_fn, POLICY)(opt_state, model, x, y)
            model, opt_state = apply_gradients(tx, grads, opt_state, model)
            return loss, model, opt_state

        self._step = step

    def step(self, x: Any, y: Any) -> Any:
        loss, self.model, self.state = self._step(self.model, self.state, x, y)
        return loss

    def arrays(self) -> Any:
        return eqx.filter(self.model, eqx.is_array)


class PlainTrainer:
    """Nested dicts of modules' parameters, as in haiku."""

    def __init__(self, tx: Any = TX, stored: Any = jnp.float32) -> None:
        keys = jax.random.split(jax.random.key(3))
        self.params = cast({"linear": {"w": jax.random.normal(keys[0], (3, 1)), "b": jnp.zeros(1)}}, stored)
        self.state = tx.init(self.params)

        @jax.jit
        def step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
            def loss_fn(params: Any, x: Any, y: Any) -> jax.Array:
                return mean_square(x @ params["linear"]["w"] + params["linear"]["b"], y)

            loss, grads = polyamp.value_and_grad(loss_fn, POLICY)(opt_state, params, x, y)
            updates, opt_state = tx.update(grads, opt_state, params)
            return loss, optax.apply_updates(params, updates), opt_state

        self._step = step

    def step(self, x: Any, y: Any) -> Any:
        loss, self.params, self.state = self._step(self.params, self.state, x, y)
        return loss

    def arrays(self) -> Any:
        return self.params


TRAINERS = [LinenTrainer, NnxTrainer, NnxSplitTrainer, EquinoxTrainer, PlainTrainer]


KINDS = [
    *((make, {}) for make in TRAINERS),
    *((make, {"tx": SELECTING}) for make in (LinenTrainer, NnxSplitTrainer)),
    *((make, {"stored": jnp.float16}) for make in (LinenTrainer, NnxTrainer, EquinoxTrainer)),
]


@pytest.mark.parametrize(("make", "options"), KINDS)
def test_training_learns_and_a_skip_touches_nothing(make: Any, options: Any) -> None:
    trainer = make(**options)
    stored = [leaf.dtype for leaf in jax.tree.leaves(trainer.arrays())]
    losses = [float(trainer.step(X, Y)) for _ in range(100)]
    assert losses[-1] < losses[0] / 10
    assert [leaf.dtype for leaf in jax.tree.leaves(trainer.arrays())] == stored
    before = jax.tree.map(np.array, trainer.arrays())
    trainer.step(SPOILED, Y)
    assert not check_limits(trainer.state).applied
    same = jax.tree.map(np.array_equal, before, jax.tree.map(np.array, trainer.arrays()))
    assert all(jax.tree.leaves(same))
    assert polyamp.save_loss_scale(trainer.state)["scale"] == 2.0**11


@pytest.mark.parametrize("make", TRAINERS)
def test_loss_scale_is_saved_and_loaded_in_what_holds_it(make: Any) -> None:
    trainer = make()
    trainer.step(SPOILED, Y)
    saved = polyamp.save_loss_scale(trainer.state)
    assert (saved["scale"], saved["skipped"]) == (2.0**11, 1)
    trainer.state = polyamp.load_loss_scale(trainer.state, saved | {"scale": 16.0, "skipped": 7})
    trainer.step(SPOILED, Y)
    assert polyamp.save_loss_scale(trainer.state)["scale"] == 8.0
    assert polyamp.save_loss_scale(trainer.state)["skipped"] == 8


def test_nnx_module_is_seen_in_the_formats_that_it_is_stored_in() -> None:
    model, seen = Nnx(), {}
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    def loss_fn(model: Nnx, x: Any) -> Any:
        seen.update(kernel=model.first.kernel[...].dtype, mean=model.norm.mean[...].dtype)
        return model(x).mean(), x

    (_, aux), grads = polyamp.value_and_grad(loss_fn, POLICY, has_aux=True)(optimizer, model, X)
    assert seen == {"kernel": jnp.float32, "mean": jnp.float32}
    assert (aux.dtype, grads["first"]["kernel"][...].dtype) == (jnp.float32, jnp.float32)
