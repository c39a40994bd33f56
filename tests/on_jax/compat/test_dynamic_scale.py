"""flax's ``DynamicScale`` against flax's own class. Needs flax."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training import dynamic_scale as real
from flax.training import train_state
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import polyamp
from polyamp.backends.jax.compat import dynamic_scale as ours
from polyamp.demo import digits_task
from polyamp.errors import PolyampDeprecationWarning
from support.loss_scale_cases import TRACES

pytestmark = pytest.mark.filterwarnings("ignore::polyamp.errors.PolyampDeprecationWarning")

SETTINGS = st.fixed_dictionaries(
    {
        "growth_interval": st.integers(1, 4),
        "growth_factor": st.sampled_from([2.0, 4.0]),
        "backoff_factor": st.sampled_from([0.5, 0.25]),
        "scale": st.integers(-3, 16).map(lambda exponent: 2.0**exponent),
        "minimum_scale": st.sampled_from([None, 2.0**-10, 1.0]),
    }
)
OVER = jnp.array([np.inf, 3.0], np.float32)
LENGTH = 60  # one length of traces, so that each program compiles once
FINE = jnp.array([2.0, 3.0], np.float32)


def loss_fn(w: jax.Array) -> jax.Array:
    return (w**2).sum()


@jax.jit
def walk(own: Any, trace: jax.Array) -> tuple[Any, Any]:
    """Return the scale after a trace, and of each step: scale, counter, flag, loss and gradients."""

    def step(own: Any, finite: Any) -> tuple[Any, Any]:
        own, finite, loss, grad = own.value_and_grad(loss_fn)(jnp.where(finite, FINE, OVER))
        return own, (own.scale, own.fin_steps, finite, loss, grad)

    return jax.lax.scan(step, own, trace)


def started(kind: Any, scale: float = 65536.0, **settings: Any) -> Any:
    """Return a scale whose leaves are arrays, so that programs of different scales are the same."""
    return kind.DynamicScale(scale=jnp.float32(scale), fin_steps=jnp.int32(0), **settings)


def assert_same(one: Any, other: Any) -> None:
    for own, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(own, theirs)


@pytest.mark.parametrize(
    "settings",
    [
        {"growth_interval": 1},
        {"growth_interval": 3, "growth_factor": 4.0, "minimum_scale": None},
        {"growth_interval": 2, "backoff_factor": 0.25, "minimum_scale": 1.0},
    ],
)
@given(trace=TRACES, exponent=st.integers(-3, 16))
def test_a_trace_is_flaxs(trace: Sequence[bool], settings: dict[str, Any], exponent: int) -> None:
    finite = jnp.array((list(trace) * LENGTH)[:LENGTH])
    assert_same(*(walk(started(kind, 2.0**exponent, **settings), finite) for kind in (ours, real)))


@given(settings=SETTINGS, counted=st.integers(0, 5))
def test_every_field_survives(settings: dict[str, Any], counted: int) -> None:
    own = ours.DynamicScale(fin_steps=counted, **settings)
    scanned = jax.lax.scan(lambda own, _: (own, None), own, None, length=2)[0]
    mapped, compiled = jax.tree.map(lambda leaf: leaf, own), jax.jit(lambda own: own)(own)
    for other in (scanned, mapped, compiled, own.replace(), pickle.loads(pickle.dumps(own)), copy.deepcopy(own)):
        assert other == own
        assert type(other) is ours.DynamicScale


def test_the_interface_is_flaxs() -> None:
    one, other = (inspect.signature(library.DynamicScale).parameters for library in (ours, real))
    assert [(p.name, p.default) for p in one.values()] == [(p.name, p.default) for p in other.values()]
    one, other = (inspect.signature(library.DynamicScale.value_and_grad).parameters for library in (ours, real))
    assert [(p.name, p.default) for p in one.values()] == [(p.name, p.default) for p in other.values()]
    assert ours.DynamicScaleResult._fields == real.DynamicScaleResult._fields


def test_leaves_have_flaxs_paths() -> None:
    paths = [[path for path, _ in jax.tree_util.tree_leaves_with_path(kind.DynamicScale())] for kind in (ours, real)]
    assert paths[0] == paths[1]


@pytest.mark.parametrize("has_aux", [False, True])
@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
def test_arguments_are_those_of_jax(argnums: Any, has_aux: bool) -> None:
    def fun(a: Any, b: Any) -> Any:
        loss = (a["w"] * b).sum()
        return (loss, {"seen": b}) if has_aux else loss

    call = [kind.DynamicScale().value_and_grad(fun, argnums, has_aux)({"w": FINE}, 2 * FINE) for kind in (ours, real)]
    assert_same(call[0][1:], call[1][1:])


def test_a_float16_loss_is_scaled_in_float32() -> None:
    """In flax the first scale is a Python number, so that float16 stays float16: 100 times 1024 is inf."""
    (own, finite, loss, grad), theirs = (
        kind.DynamicScale(scale=1024.0).value_and_grad(lambda w: w**2)(jnp.float16(10)) for kind in (ours, real)
    )
    assert bool(finite)
    assert (loss, grad, own.scale) == (100, 20, 1024)
    assert loss.dtype == grad.dtype == jnp.float32
    assert np.isinf(theirs.aux)


def test_a_large_loss_comes_back_as_it_was() -> None:
    _, finite, loss, _ = ours.DynamicScale(scale=2.0**120).value_and_grad(lambda w: w.sum())(jnp.float32([2.0**20]))
    assert bool(finite)
    assert loss == 2.0**20


def test_a_step_is_traced_once() -> None:
    """With flax's it is traced twice: the first scale is a weak type."""
    traced = []
    step = jax.jit(lambda own, w: traced.append(1) or own.value_and_grad(loss_fn)(w)[0])
    own = ours.DynamicScale()
    for _ in range(3):
        own = step(own, FINE)
    assert len(traced) == 1


def test_the_scale_stays_a_power_of_two_at_its_limits() -> None:
    step = jax.jit(lambda own: own.value_and_grad(lambda w: w * 2.0**-10)(1.0)[0])
    high, theirs = (started(kind, 2.0**126, growth_interval=1) for kind in (ours, real))
    for _ in range(6):
        high, theirs = step(high), step(theirs)
    assert high.scale == 2.0**127 != theirs.scale
    low, _ = walk(started(ours, 2.0**-120, minimum_scale=0.0), jnp.zeros(LENGTH, bool))
    assert low.scale == 2.0**-126


@pytest.mark.parametrize("finite", [(True, True), (True, False), (False, False)])
def test_devices_share_the_flag_and_average_the_gradients(finite: tuple[bool, bool]) -> None:
    batch = jnp.stack([FINE if flag else OVER for flag in finite])

    def step(own: Any, w: Any, x: Any) -> Any:
        return own.value_and_grad(lambda w: (w * x).sum(), axis_name="i")(w)

    run = jax.vmap(step, (None, None, 0), axis_name="i")
    assert_same(*(run(started(kind), FINE, batch) for kind in (ours, real)))


@pytest.mark.parametrize("mapped", ["pmap", "shard_map"])
def test_a_mapped_step_is_flaxs(mapped: str) -> None:
    def step(own: Any, w: Any) -> Any:
        own, finite, _, grads = own.value_and_grad(loss_fn, axis_name="i")(w)
        return own, finite, grads

    def run(own: Any) -> Any:
        if mapped == "pmap":
            return jax.pmap(step, axis_name="i")(*jax.tree.map(lambda leaf: leaf[None], (own, FINE)))
        replicated = PartitionSpec()
        mesh = jax.make_mesh((1,), ("i",))
        return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=replicated, out_specs=replicated))(own, FINE)

    assert_same(*(run(started(kind)) for kind in (ours, real)))


def test_states_load_both_ways() -> None:
    own, theirs = ours.DynamicScale(), real.DynamicScale()
    moved = [kind.replace(scale=jnp.float32(32), fin_steps=jnp.int32(7)) for kind in (own, theirs)]
    assert serialization.to_state_dict(moved[0]).keys() == serialization.to_state_dict(moved[1]).keys()
    for target, saved in ((own, moved[1]), (theirs, moved[0])):
        for loaded in (
            serialization.from_state_dict(target, serialization.to_state_dict(saved)),
            serialization.from_bytes(target, serialization.to_bytes(saved)),
        ):
            assert type(loaded) is type(target)
            assert (loaded.scale, loaded.fin_steps) == (32, 7)
    settings = polyamp.LossScale.like("flax")
    for saved in (*moved, serialization.to_state_dict(moved[0])):
        state = settings.from_state_dict(saved)
        assert (state.scale, state.good_steps) == (32.0, 6)


@pytest.mark.parametrize(
    "wrong",
    [{"growth_factor": 1.0}, {"backoff_factor": 1.5}, {"growth_interval": 0}, {"growth_interval": "2"}],
)
def test_settings_outside_their_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(polyamp.PolyampError, match="loss-scale setting"):
        ours.DynamicScale(**wrong)


def test_the_line_to_write_is_shown() -> None:
    with pytest.warns(PolyampDeprecationWarning, match="polyamp.wrap_optimizer") as caught:
        ours.DynamicScale().replace(scale=2.0)
    assert len(caught) == 1
    assert caught[0].filename == __file__


class TrainState(train_state.TrainState):
    dynamic_scale: Any


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(nn.Dense(32, dtype=jnp.float16)(x.reshape(len(x), -1)))
        return nn.Dense(10, dtype=jnp.float16)(x).astype(jnp.float32)


def test_flaxs_recipe_trains_bit_for_bit_as_with_flax() -> None:
    task, model = digits_task(steps=40), Model()
    params = model.init(jax.random.key(0), task.train_images[:2])

    @jax.jit
    def step(state: Any, x: Any, y: Any) -> Any:
        def of(params: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(state.apply_fn(params, x), y).mean()

        scale, finite, loss, grads = state.dynamic_scale.value_and_grad(of)(state.params)
        new = state.apply_gradients(grads=grads)
        kept = lambda new, old: jax.tree.map(lambda one, other: jnp.where(finite, one, other), new, old)  # noqa: E731
        params, opt_state = kept(new.params, state.params), kept(new.opt_state, state.opt_state)
        return new.replace(params=params, opt_state=opt_state, dynamic_scale=scale), (loss, scale.scale)

    def trained(kind: Any) -> Any:
        own = kind.DynamicScale(scale=2.0**22, growth_interval=8)
        state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2), dynamic_scale=own)
        seen = []
        for chosen in task.batches:
            state, row = step(state, task.train_images[chosen], task.train_labels[chosen])
            seen.append(tuple(map(float, row)))
        restored = serialization.from_bytes(state, serialization.to_bytes(state))
        assert_same(restored.dynamic_scale, state.dynamic_scale)
        return seen

    own = trained(ours)
    assert own == trained(real)
    assert own[-1][0] < 0.6 * own[0][0]
    assert len({scale for _, scale in own}) > 2  # it overflowed and grew
