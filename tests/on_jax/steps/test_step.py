"""A wrapped optax optimizer: tested, unscaled, clipped, updated through master weights, limited; in that order."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import polyamp
from polyamp.backends.jax import apply_gradients, check_limits
from support.jax_cases import FLOAT16, bits


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:autocast to .* changed nothing")
@pytest.mark.parametrize("policy", ["float32", FLOAT16], ids=["float32", "float16"])
def test_the_compiled_step_grows_with_the_parameters_and_not_with_their_square(policy: Any) -> None:
    """XLA copied the flags and the norm of all gradients into the kernel of every parameter: 130 s for 200 of them."""
    tx = polyamp.wrap_optimizer(optax.adam(0.1), policy, max_grad_norm=1.0)

    def loss_fn(params: Any) -> jax.Array:
        return sum(jnp.square(param - 1).sum() for param in params)  # such a sum is copied as well

    def step(params: Any, opt_state: Any) -> Any:
        _, grads = polyamp.value_and_grad(loss_fn, policy)(opt_state, params)
        return apply_gradients(tx, grads, opt_state, params)

    def lines(count: int) -> int:
        params = [jnp.ones((3, 2 + number % 5)) for number in range(count)]
        return jax.jit(step).lower(params, tx.init(params)).compile().as_text().count("\n")

    assert lines(40) < 6 * lines(10)


@pytest.mark.parametrize("shape", [(1,), (1024, 1024)])
@pytest.mark.parametrize("spoil", [np.nan, np.inf])
def test_one_bad_element_is_found_among_many(shape: tuple[int, ...], spoil: float) -> None:
    """The largest absolute value hides it: XLA drops a NaN in a large maximum on CPUs."""
    tx = polyamp.wrap_optimizer(optax.sgd(0.1), FLOAT16)
    grads = jnp.ones(shape).at[(0,) * len(shape)].set(spoil)
    assert not jax.jit(tx.update)(grads, tx.init(grads))[1].last_step


def test_adam_on_half_gradients_stays_finite() -> None:
    """In float16 the second moment underflows to zero and the update is -inf."""
    tx = polyamp.wrap_optimizer(optax.adam(0.1), FLOAT16, master_weights=False)
    weights = jnp.ones(2, jnp.float16)
    state = tx.init(weights)
    updates, state = jax.jit(tx.update)(jnp.array([1e-4, 1e-3], jnp.float16), state, weights)
    assert jnp.isfinite(updates).all()
    assert updates.dtype == jnp.float32


@given(st.lists(st.floats(-2.0, 2.0, width=32), min_size=3, max_size=3))
@settings(max_examples=50, deadline=None)
def test_updates_lead_to_the_rounded_masters(grads: list[float]) -> None:
    tx = polyamp.wrap_optimizer(optax.sgd(0.37), FLOAT16, loss_scale=polyamp.LossScale.fixed(1.0))
    weights = jnp.array([2.0, -1.0, 0.3], jnp.bfloat16)
    updates, state = tx.update(jnp.array(grads), tx.init(weights), weights)
    masters = state.master_weights
    shrinks = np.abs(np.asarray(masters)) * 2.0**13 < np.abs(np.asarray(weights, np.float32))
    arrived = optax.apply_updates(weights, updates).astype(jnp.float32)
    rounded = masters.astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(np.where(shrinks, 0, arrived), np.where(shrinks, 0, rounded))
    np.testing.assert_allclose(arrived, rounded, rtol=0, atol=2.0**-24 * 2)
    assert bits(apply_gradients(tx, jnp.array(grads), tx.init(weights), weights)[0]) == bits(
        masters.astype(jnp.bfloat16)
    )


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**-14, 1.0, 2.0**24, 2.0**126, 2.0**127])
def test_unscaling_is_exact_at_every_power_of_two(scale: float) -> None:
    tx = polyamp.wrap_optimizer(optax.sgd(1.0), FLOAT16, loss_scale=polyamp.LossScale.fixed(scale))
    state = tx.init(jnp.zeros(1))
    updates, _ = jax.jit(tx.update)(jnp.array([1.5]) * state.loss_scale, state)
    assert updates.tolist() == [-1.5]


@pytest.mark.parametrize("grad", [np.float16(32e3), np.float32(1.7e38), np.complex64(3 + 4j)])
def test_clipping_does_not_overflow_and_sees_magnitudes(grad: Any) -> None:
    tx = polyamp.wrap_optimizer(optax.sgd(1.0), FLOAT16, loss_scale=polyamp.LossScale.fixed(1.0), max_grad_norm=1.0)
    updates, _ = jax.jit(tx.update)(
        jnp.array([grad, grad]), tx.init(jnp.zeros(2, jnp.promote_types(grad.dtype, jnp.float32)))
    )
    np.testing.assert_allclose(updates, np.full(2, -grad / abs(grad) * np.sqrt(0.5)), rtol=1e-3)


@pytest.mark.parametrize("large", [1.0, 2.0**60])
def test_gradients_within_the_limit_keep_every_bit(large: float) -> None:
    config = polyamp.LossScale.fixed(1.0)
    tx = polyamp.wrap_optimizer(optax.identity(), FLOAT16, loss_scale=config, max_grad_norm=2.0**61)
    grads = jnp.array([large, 1e-30, -3e-38])
    assert bits(jax.jit(tx.update)(grads, tx.init(grads))[0]) == bits(grads)


def test_leaves_without_gradient_are_passed_over() -> None:
    tx = polyamp.wrap_optimizer(optax.adam(0.1), FLOAT16)
    tree = {"w": jnp.ones(2), "n": jnp.arange(3), "none": None, "flag": True, "rate": 0.5, "act": jax.nn.relu}
    grads = {
        "w": jnp.ones(2),
        "n": np.zeros(3, jax.dtypes.float0),
        "none": None,
        "flag": None,
        "rate": None,
        "act": None,
    }
    new, state = apply_gradients(tx, grads, tx.init(tree), tree)
    assert state.last_step
    assert (new["w"] < 1).all()
    assert {key: new[key] is tree[key] for key in tree if key != "w"} == dict.fromkeys(tree.keys() - {"w"}, True)


def test_extra_arguments_reach_the_inner_optimizer() -> None:
    inner = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
    tx = polyamp.wrap_optimizer(inner, FLOAT16)
    state = tx.init(jnp.ones(1))
    for _ in range(4):
        _, state = jax.jit(tx.update)(jnp.ones(1), state, jnp.ones(1), value=jnp.float32(1.0))
    assert optax.tree.get(state, "scale") < 1


def test_complex_and_float64_gradients_keep_their_dtype() -> None:
    tx = polyamp.wrap_optimizer(optax.sgd(1.0), FLOAT16)
    with jax.enable_x64(True):
        weights = {"c": jnp.ones(1, jnp.complex64), "d": jnp.ones(1, jnp.float64)}
        state = tx.init(weights)
        new, state = jax.jit(functools.partial(apply_gradients, tx))(
            jax.tree.map(lambda w: w * 2.0**10 * 0.1, weights), state, weights
        )
    assert state.last_step
    assert (new["c"].dtype, new["d"].dtype, state.loss_scale.dtype, state.skipped.dtype) == (
        np.complex64,
        np.float64,
        np.float32,
        np.int32,
    )
    np.testing.assert_allclose(new["d"], 0.9, rtol=1e-15)


def test_masters_without_parameters_are_refused() -> None:
    tx = polyamp.wrap_optimizer(optax.sgd(0.1), "O2")
    state = tx.init(jnp.ones(1, jnp.float16))
    with pytest.raises(polyamp.errors.UsageError, match="needs the parameters"):
        tx.update(jnp.ones(1, jnp.float16), state)


def test_foreign_state_is_refused() -> None:
    tx = polyamp.wrap_optimizer(optax.sgd(0.1), FLOAT16)
    with pytest.raises(polyamp.errors.StateError, match="the state does not come from this optimizer"):
        tx.update(jnp.ones(1), optax.sgd(0.1).init(jnp.ones(1)))


@pytest.mark.parametrize("compiled", [False, True])
def test_limits_are_told(compiled: bool) -> None:
    tx = polyamp.wrap_optimizer(optax.sgd(0.1), FLOAT16, loss_scale=polyamp.LossScale(max_skips=2))
    update = jax.jit(tx.update) if compiled else tx.update
    _, state = update(jnp.array([jnp.nan]), tx.init(jnp.ones(1)))
    assert check_limits(state).skipped_in_a_row == 1
    with pytest.raises(polyamp.errors.LossScaleError, match="2 steps in a row"):
        check_limits(update(jnp.array([jnp.nan]), state)[1])
