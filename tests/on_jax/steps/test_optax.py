"""The wrapped optimizer around every kind of optax transformation, and inside others: exact, compiled, donated."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import polyamp
from polyamp.backends.jax import check_limits, select
from support.harness import overflow_trace
from support.jax_cases import FLOAT16, MASK, OPTIMIZERS, STEPS, bits, gradients, params, wrapped_to_step

COMPILED = STEPS[:-1]


@pytest.mark.parametrize(
    ("name", "how"),
    [*((name, "apply_gradients") for name in OPTIMIZERS), *(("MultiSteps", how) for how in STEPS)],
)
def test_skipped_step_changes_no_bit(name: str, how: str) -> None:
    tx, step = wrapped_to_step(OPTIMIZERS[name], how)
    held = params(), tx.init(params())
    for seed in range(2):  # from the start, where some parameters are -0.0, and after a step
        after = step(*held, gradients(seed, held[1].loss_scale, np.nan))
        untouched = [(p, s.inner_state, s.master_weights) for p, s in (held, after)]
        assert bits(untouched[0]) == bits(untouched[1])
        assert not after[1].last_step
        assert after[1].loss_scale == held[1].loss_scale / 2
        held = step(*after, gradients(seed, after[1].loss_scale))
        assert held[1].last_step


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_applied_step_is_the_plain_one(name: str) -> None:
    start = {key: value for key, value in params().items() if key != "half"} | {"half": jnp.ones(3)}
    wrapped, plain = polyamp.wrap_optimizer(OPTIMIZERS[name], FLOAT16), OPTIMIZERS[name]
    ours, theirs = (start, wrapped.init(start)), (start, plain.init(start))
    for seed in range(3):
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), gradients(seed, jnp.float32(1)))
        scaled = optax.tree.scale(ours[1].loss_scale, grads)
        updates, state = wrapped.update(scaled, ours[1], ours[0])
        ours = optax.apply_updates(ours[0], updates), state
        updates, state = plain.update(grads, theirs[1], theirs[0])
        theirs = optax.apply_updates(theirs[0], updates), state
    assert bits((ours[0], ours[1].inner_state)) == bits(theirs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_loss_scale_gives_the_very_updates_of_the_plain_optimizer(name: str) -> None:
    options = {"loss_scale": polyamp.LossScale.none(), "master_weights": False}
    wrapped, plain = polyamp.wrap_optimizer(OPTIMIZERS[name], **options), OPTIMIZERS[name]
    grads = gradients(0, jnp.float32(1), spoil=np.nan)
    ours, state = jax.jit(wrapped.update)(grads, wrapped.init(params()), params())
    theirs, plain_state = jax.jit(plain.update)(grads, plain.init(params()), params())
    assert bits((ours, state.inner_state)) == bits((theirs, plain_state))
    assert state.last_step.applied is True


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_skipped_step_gives_back_subnormal_parameters(dtype: Any) -> None:
    smallest = np.full(3, np.finfo(np.float32).smallest_subnormal) if dtype == jnp.float32 else np.full(3, 1e-39)
    weights = jnp.asarray(np.array([-0.0, *smallest], np.float32)).astype(dtype)
    if dtype == jnp.float16:
        weights = jnp.full(4, jnp.finfo(dtype).smallest_subnormal)
    tx, step = wrapped_to_step(optax.adam(0.1), "apply_gradients")
    assert bits(step(weights, tx.init(weights), jnp.full(4, jnp.inf, dtype))[0]) == bits(weights)


@pytest.mark.parametrize("how", COMPILED)
@pytest.mark.parametrize("name", ["inject_hyperparams", "MultiSteps"])
def test_one_trace_and_donated_buffers(name: str, how: str) -> None:
    """A scale that is weakly typed at first makes jit trace again at the second step (flax DynamicScale)."""
    tx, inner_step = wrapped_to_step(OPTIMIZERS[name], how)
    traces = []

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, opt_state: Any, spoil: Any) -> Any:
        traces.append(how)
        grads = jax.tree.map(lambda p: (jnp.ones_like(p) * opt_state.loss_scale * spoil).astype(p.dtype), params)
        return inner_step(params, opt_state, grads)

    held = params(), tx.init(params())
    for finite in overflow_trace(0, 8):
        before = jax.tree.leaves(held)
        held = step(*held, 1.0 if finite else jnp.inf)
        assert all(leaf.is_deleted() for leaf in before)
    assert traces == [how]
    assert not any(leaf.weak_type for leaf in jax.tree.leaves((held[1], tx.init(params()))) if leaf.dtype != bool)


@pytest.mark.parametrize(("max_grad_norm", "spare"), [(None, 1), (1.0, 5)])
@pytest.mark.parametrize("half", [False, True])
def test_donated_step_needs_no_second_copy_of_anything(half: bool, max_grad_norm: float | None, spare: int) -> None:
    """If XLA does not fuse them, each element's test for inf and NaN takes one byte, and its square four."""
    weights = [jnp.ones((256, 256), jnp.float16 if half else jnp.float32) for _ in range(4)]
    tx, step = wrapped_to_step(optax.adam(0.1), "apply_gradients", max_grad_norm=max_grad_norm)
    donated = jax.jit(lambda *args: step(*args), donate_argnums=(0, 1))
    memory = donated.lower(weights, tx.init(weights), weights).compile().memory_analysis()
    count = sum(weight.size for weight in weights)
    assert memory.alias_size_in_bytes >= count * (14 if half else 12)
    if max_grad_norm and jax.__version_info__ < (0, 10):
        spare = 8  # JAX 0.9's XLA keeps the squares twice
    assert memory.temp_size_in_bytes <= count * spare * 1.1


@pytest.mark.parametrize("how", STEPS)
@pytest.mark.parametrize("finite", [True, False])
def test_lookahead_updates_more_than_it_differentiates(how: str, finite: bool) -> None:
    plain = optax.lookahead(optax.sgd(1.0), sync_period=1, slow_step_size=0.5)
    weights = optax.LookaheadParams.init_synced({"w": jnp.ones(2, jnp.float16), "b": jnp.ones(1)})
    tx, step = wrapped_to_step(plain, how)
    state = tx.init(weights)
    grads = jax.tree.map(lambda w: (w * (state.loss_scale if finite else jnp.nan)).astype(w.dtype), weights.fast)
    new, new_state = step(weights, state, grads)
    assert bool(new_state.last_step) is finite
    expected = jax.tree.map(lambda w: w * 0.5, weights) if finite else weights
    assert bits(new) == bits(expected)
    assert (bits(new_state.inner_state) == bits(state.inner_state)) is True  # a period of one always starts anew


def test_every_member_of_a_mapped_ensemble_has_its_own_scale() -> None:
    tx, step = wrapped_to_step(optax.adam(0.1), "apply_gradients")
    weights = jnp.ones((3, 2))
    grads = jnp.full((3, 2), 2.0**10).at[1, 0].set(jnp.inf)
    new, state = jax.jit(jax.vmap(step))(weights, jax.vmap(tx.init)(weights), grads)
    assert state.loss_scale.tolist() == [2.0**10, 2.0**9, 2.0**10]
    assert str(state.last_step).startswith("StepResult(applied=[ True False  True]")
    for use in (polyamp.health, polyamp.save_loss_scale, check_limits, lambda state: bool(state.last_step)):
        with pytest.raises(polyamp.errors.UsageError, match="pass one member"):
            use(state)
    unmapped = (lambda: step(weights, state, grads), lambda: polyamp.scale_loss(jnp.float32(1), state))
    for use in unmapped:
        with pytest.raises(polyamp.errors.UsageError, match=r"shape \(3,\)"):
            use()
    one, copies = jax.tree.map(lambda leaf: leaf[1], state), jax.tree.map(lambda leaf: leaf[jnp.array([1, 1])], state)
    assert (polyamp.health(one).skipped, polyamp.health(copies).skipped) == (1, 1)
    assert (new == 1).all(axis=1).tolist() == [False, True, False]


def test_a_part_that_checks_nothing_is_welcome() -> None:
    unchecked = polyamp.wrap_optimizer(optax.sgd(0.1), "mixed_bfloat16", loss_scale=polyamp.LossScale.none())
    assert polyamp.scale_loss(jnp.float32(1), optax.MultiSteps(unchecked, 2).init(jnp.zeros(1))) == 1


@pytest.mark.parametrize("name", ["chain", "MultiSteps", "masked"])
def test_wrapping_what_is_wrapped_inside_is_refused(name: str) -> None:
    inner = polyamp.wrap_optimizer(optax.sgd(0.1), FLOAT16)
    around = {"chain": optax.chain, "MultiSteps": lambda tx: optax.MultiSteps(tx, 2), "masked": masked}[name]
    with pytest.raises(polyamp.errors.UsageError, match="wrapped already"):
        polyamp.wrap_optimizer(around(inner), FLOAT16).init(params())


def masked(tx: Any) -> Any:
    return optax.masked(tx, MASK)


@pytest.mark.parametrize("around", [optax.chain, masked])
def test_loss_scale_is_the_one_that_optax_finds(around: Any) -> None:
    tx = around(polyamp.wrap_optimizer(optax.inject_hyperparams(optax.adam)(0.1), FLOAT16))
    assert optax.tree.get(tx.init(params()), "loss_scale") == 2.0**10


@pytest.mark.parametrize("how", COMPILED)
def test_a_step_has_one_conditional(how: str) -> None:
    tx, step = wrapped_to_step(optax.adam(0.1), how)
    program = str(jax.make_jaxpr(step)(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2)))
    assert program.count(" cond[") == 1


@pytest.mark.parametrize("spoiled", [None, 0, 1])
def test_losses_of_one_step_can_have_scales_of_their_own(spoiled: int | None) -> None:
    """A wrapped ``optax.identity`` is a loss scale and nothing else; the step is the plain optimizer's."""
    scaler, tx = polyamp.wrap_optimizer(optax.identity(), FLOAT16), optax.adam(0.1)
    factors = [1e-3 if spoiled != 0 else jnp.inf, 1e3 if spoiled != 1 else jnp.inf]

    @jax.jit
    def step(weights: Any, opt_state: Any, scalers: Any, factors: Any) -> Any:
        def unscaled(state: Any, factor: Any) -> Any:
            grads = jax.grad(lambda w: polyamp.scale_loss((w * factor).sum(), state))(weights)
            return scaler.update(grads, state)

        (one, first), (other, second) = (unscaled(*pair) for pair in zip(scalers, factors, strict=True))
        updates, new_state = tx.update(jax.tree.map(jnp.add, one, other), opt_state, weights)
        applied = jnp.logical_and(first.last_step.applied, second.last_step.applied)
        held = select(applied, (optax.apply_updates(weights, updates), new_state), (weights, opt_state))
        return *held, (first, second)

    weights = jnp.ones(2)
    start = weights, tx.init(weights)
    *held, scalers = step(*start, (scaler.init(weights), scaler.init(weights)), factors)
    assert (bits(held) == bits(start)) is (spoiled is not None)
    expected = [2.0**9 if spoiled == index else 2.0**10 for index in range(2)]
    assert [float(state.loss_scale) for state in scalers] == expected
