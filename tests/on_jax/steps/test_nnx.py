"""flax NNX modules: batch statistics of a skipped step, several modules, counters that do not count skips."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import polyamp
from support.jax_scenarios import quickly_compiled as quickly_compiled

POLICY = polyamp.policy("mixed_float16", loss_scale=polyamp.LossScale(init=2.0**4))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.last = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def loss_fn(model: Model, x: Any) -> Any:
    return jnp.square(model(x)).mean()


def statistics(model: Any) -> list[Any]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.BatchStat))]


def counts(model: Any) -> list[int]:
    return [int(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.RngCount))]


def started() -> tuple[Model, Any]:
    model = Model(nnx.Rngs(0))
    tx = polyamp.wrap_optimizer(optax.adam(0.1), POLICY)
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def step(model: Any, optimizer: Any, x: Any) -> Any:
    loss, grads = polyamp.value_and_grad(loss_fn, POLICY)(optimizer.opt_state, model, x)
    optimizer.update(model, grads)
    return loss


GOOD = jax.random.normal(jax.random.key(1), (16, 4))
OVERFLOWING = GOOD.at[0, 0].set(1e30)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the loss was not finite")
def test_a_skipped_step_leaves_batch_statistics_bit_identical() -> None:
    model, optimizer = started()
    run = nnx.jit(step)
    run(model, optimizer, GOOD)
    before, used = statistics(model), counts(model)
    run(model, optimizer, OVERFLOWING)
    assert optimizer.opt_state.last_step.skipped_in_a_row == 1
    assert all(np.array_equal(new, old) for new, old in zip(statistics(model), before, strict=True))
    assert counts(model) > used  # the next step draws other random numbers
    run(model, optimizer, GOOD)
    assert optimizer.opt_state.last_step
    assert all(np.isfinite(new).all() for new in statistics(model))
    assert not all(np.array_equal(new, old) for new, old in zip(statistics(model), before, strict=True))


@pytest.mark.filterwarnings("ignore:the loss was not finite")
def test_without_a_check_nothing_is_put_back() -> None:
    """Without a check nothing is skipped, so the statistics go along with the parameters."""
    model = Model(nnx.Rngs(0))
    unchecked = polyamp.wrap_optimizer(optax.sgd(0.1), "mixed_bfloat16", loss_scale=polyamp.LossScale.none())
    optimizer = nnx.Optimizer(model, unchecked, wrt=nnx.Param)
    polyamp.value_and_grad(loss_fn, "mixed_bfloat16")(optimizer.opt_state, model, GOOD.at[0, 0].set(jnp.nan))
    assert not all(np.isfinite(new).all() for new in statistics(model))


def test_modules_by_argnums_are_both_differentiated() -> None:
    first, second = nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 2, rngs=nnx.Rngs(1))
    state = polyamp.wrap_optimizer(optax.sgd(0.1), POLICY).init(nnx.state((first, second), nnx.Param))

    def loss(one: Any, x: Any, other: Any) -> Any:
        return jnp.square(other(nnx.relu(one(x)))).mean()

    found = polyamp.backends.jax.value_and_grad(loss, POLICY, argnums=(0, 2))(state, first, GOOD, second)[1]
    exact = nnx.grad(loss, argnums=(0, 2))(first, GOOD, second)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(one / 16, other, rtol=2e-2, atol=1e-3)


class Mean(nnx.Module):
    """A teacher that keeps a running mean of what it was shown, as a batch norm does."""

    def __init__(self) -> None:
        self.mean = nnx.BatchStat(jnp.zeros(4))

    def __call__(self, x: Any) -> Any:
        self.mean[...] = (self.mean[...] + x.mean(0)) / 2
        return x - self.mean[...]


def loss_with_others(model: Any, x: Any, teacher: Mean, rngs: nnx.Rngs, metrics: Any) -> Any:
    noise = jax.random.normal(rngs.noise(), x.shape) / 8
    loss = jnp.square(model(teacher(x) + noise)).mean()
    metrics["seen"].update(loss=loss)
    return loss


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", POLICY], ids=str)
def test_objects_in_other_arguments_are_changed_as_by_flax(policy: Any, compiled: bool) -> None:
    tx = polyamp.wrap_optimizer(optax.sgd(0.1), policy)

    def ours(model: Any, *args: Any, **kwargs: Any) -> Any:
        state = tx.init(nnx.state(model, nnx.Param))
        loss, grads = polyamp.value_and_grad(loss_with_others, policy)(state, model, *args, **kwargs)
        return loss, jax.tree.map(lambda leaf: leaf / state.scalars.scale, grads)

    found = []
    for differentiate in (ours, nnx.value_and_grad(loss_with_others)):
        model, teacher, rngs = nnx.Linear(4, 2, rngs=nnx.Rngs(0)), Mean(), nnx.Rngs(noise=3)
        metrics = {"seen": nnx.metrics.Average("loss")}
        run = nnx.jit(differentiate) if compiled else differentiate
        for _ in range(2):
            loss, grads = run(model, GOOD, teacher, rngs, metrics)
        found.append((loss, jax.tree.leaves(grads), teacher.mean[...], metrics["seen"].compute(), counts(rngs)))
    assert found[0][-1] == found[1][-1] == [2]
    for one, other in zip(*(jax.tree.leaves(each[:-1]) for each in found), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-2, atol=1e-3)


@pytest.mark.filterwarnings("ignore:the loss was not finite")
def test_a_skipped_step_leaves_statistics_of_other_arguments_and_draws_new_random_numbers() -> None:
    model, teacher, rngs = nnx.Linear(4, 2, rngs=nnx.Rngs(0)), Mean(), nnx.Rngs(noise=3)
    metrics = {"seen": nnx.metrics.Average("loss")}
    state = polyamp.wrap_optimizer(optax.sgd(0.1), POLICY).init(nnx.state(model, nnx.Param))
    step = polyamp.value_and_grad(loss_with_others, POLICY)
    step(state, model, GOOD, teacher, rngs, metrics=metrics)
    before = (teacher.mean[...], metrics["seen"].compute())
    step(state, model, OVERFLOWING, teacher, rngs, metrics=metrics)
    assert np.array_equal(teacher.mean[...], before[0])
    assert metrics["seen"].total[...] == before[1]
    assert counts(rngs) == [2]
