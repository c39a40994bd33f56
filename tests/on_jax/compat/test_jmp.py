"""The interface of jmp: its policies and loss scales against those of jmp itself. Needs jmp and dm-haiku."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import jmp as real
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import polyamp
import polyamp.backends.jax.compat.jmp as ours
from polyamp.demo import digits_task
from polyamp.errors import PolyampDeprecationWarning, PolyampWarning
from support.loss_scale_cases import TRACES

pytestmark = pytest.mark.filterwarnings("ignore::polyamp.errors.PolyampDeprecationWarning")

FLOATING = (jnp.float16, jnp.bfloat16, jnp.float32)
FIELDS = ("loss_scale", "counter", "period", "factor", "min_loss_scale")


def powers(low: int, high: int) -> Any:
    return st.integers(low, high).map(lambda exponent: 2.0**exponent)


@st.composite
def scales(draw: st.DrawFn) -> ours.DynamicLossScale:
    kind = draw(st.sampled_from([jnp.float32, jnp.float16, np.float32, float]))
    return ours.DynamicLossScale(
        kind(draw(powers(-4, 15))),
        jnp.int32(draw(st.integers(0, 4))),
        draw(st.integers(5, 9)),
        draw(st.sampled_from([2, 4.0])),
        draw(st.sampled_from([jnp.float32, np.float32, np.asarray, float]))(draw(powers(-8, 0))),
    )


def assert_same_fields(one: Any, other: Any) -> None:
    for name in FIELDS:
        assert np.array_equal(getattr(one, name), getattr(other, name)), name


def through_scan(scale: Any) -> Any:
    return jax.lax.scan(lambda own, _: (own, None), scale, None, length=2)[0]


@pytest.mark.parametrize(
    "through",
    [
        lambda own: jax.tree.map(lambda leaf: leaf, own),
        lambda own: jax.tree.unflatten(jax.tree.structure(own), jax.tree.leaves(own)),
        jax.jit(lambda own: own),
        through_scan,
        lambda own: jax.lax.cond(True, lambda one: one, lambda one: one, own),
        lambda own: pickle.loads(pickle.dumps(own)),
    ],
    ids=["tree_map", "flatten", "jit", "scan", "cond", "pickle"],
)
@given(scale=scales())
def test_every_field_survives(through: Any, scale: ours.DynamicLossScale) -> None:
    """jmp loses ``min_loss_scale``."""
    assert_same_fields(through(scale), scale)


@given(trace=TRACES, init=powers(-3, 16), period=st.integers(1, 4), factor=st.sampled_from([2, 4]), low=powers(-3, 3))
def test_a_trace_is_jmps(trace: Sequence[bool], init: float, period: int, factor: int, low: float) -> None:
    made = [
        library.DynamicLossScale(jnp.float32(init), jnp.int32(0), period, factor, jnp.float32(low))
        for library in (ours, real)
    ]
    for finite in trace:
        made = [scale.adjust(jnp.bool_(finite)) for scale in made]
        assert_same_fields(*made)


LENGTH = 60  # one length of traces, so that each program compiles once


@jax.jit
def walk(own: Any, trace: Any) -> Any:
    return jax.lax.scan(lambda own, finite: ((new := own.adjust(finite)), new.loss_scale), own, trace)


def repeated(trace: Sequence[bool]) -> jax.Array:
    return jnp.array((list(trace) * LENGTH)[:LENGTH])


@pytest.mark.parametrize("low", [2.0**-6, 1.0, 2.0**3])
@given(trace=TRACES)
def test_a_compiled_trace_keeps_its_minimum(trace: Sequence[bool], low: float) -> None:
    made = ours.DynamicLossScale(jnp.float32(8), jnp.int32(0), period=2, min_loss_scale=np.float32(low))
    finite = repeated(trace)
    walked, scales_ = walk(made, finite)
    for index in range(8):
        made = made.adjust(finite[index])
        assert made.loss_scale == scales_[index]
    assert walked.min_loss_scale == low
    assert scales_.min() >= min(low, 8)


@jax.jit
def walk_from(low: Any, trace: Any) -> Any:
    own = ours.DynamicLossScale(jnp.float32(8), jnp.int32(0), period=2, min_loss_scale=low)
    return jax.lax.scan(lambda own, finite: (own.adjust(finite), None), own, trace)[0]


@given(trace=TRACES)
def test_a_traced_minimum_is_kept(trace: Sequence[bool]) -> None:
    made = ours.DynamicLossScale(jnp.float32(8), jnp.int32(0), period=2, min_loss_scale=np.float32(0.5))
    assert_same_fields(walk_from(0.5, repeated(trace)), walk(made, repeated(trace))[0])


@pytest.mark.parametrize("low", [2.0**-30, 2.0**-9])
@pytest.mark.parametrize("dtype", FLOATING)
@given(trace=TRACES)
def test_a_scale_keeps_its_dtype_and_stays_a_power_of_two(trace: Sequence[bool], dtype: Any, low: float) -> None:
    """In jmp a float16 scale cannot be adjusted at all."""
    own = ours.DynamicLossScale(jnp.asarray(2.0**10, dtype), jnp.int32(0), period=1, min_loss_scale=low)
    _, seen = walk(own, repeated(trace))
    assert seen.dtype == dtype
    assert np.isfinite(np.float32(seen)).all()
    assert set(np.frexp(np.float32(seen))[0]) == {0.5}
    assert np.float32(seen).min() >= max(low, float(jnp.finfo(dtype).tiny))


def test_growth_beyond_float16_is_refused() -> None:
    own = ours.DynamicLossScale(jnp.float16(2**15), period=1).adjust(jnp.bool_(True))
    assert own.loss_scale == 2**15
    uneven = ours.DynamicLossScale(jnp.float16(40000), period=1).adjust(jnp.bool_(True))
    assert uneven.loss_scale == jnp.float16(40000)


@pytest.mark.parametrize("scale", [2.0**15, jnp.float32(2**15), jnp.float16(2**15)], ids=["python", "f32", "f16"])
def test_small_gradients_are_unscaled_in_float32(scale: Any) -> None:
    own = ours.DynamicLossScale(scale)
    assert own.unscale(jnp.float16(2**-10)) == 2.0**-25  # 0 in float16
    assert own.scale(jnp.float16(8)) == own.scale(8) == 2.0**18  # inf in float16


@pytest.mark.parametrize("kind", [ours.DynamicLossScale, ours.StaticLossScale])
def test_a_scale_is_an_argument_of_what_is_only_lowered(kind: Any) -> None:
    lowered = jax.jit(lambda scale, x: scale.scale(x)).lower(kind(jnp.float32(4)), jnp.float32(3))
    assert lowered.compile()(kind(jnp.float32(4)), jnp.float32(3)) == 12


@pytest.mark.parametrize("value", [4, np.float32(4), jnp.float16(4)])
def test_a_static_scale_survives_jit(value: Any) -> None:
    own = jax.jit(lambda scale: scale)(ours.StaticLossScale(value))
    assert own.loss_scale == 4
    assert not jax.tree.leaves(own)
    traced = jax.jit(lambda value: ours.StaticLossScale(value))(jnp.float32(8))
    assert traced.scale(jnp.float32(2)) == 16


@pytest.mark.parametrize("parts", [(a, b, c) for a in FLOATING for b in FLOATING for c in FLOATING])
def test_a_policy_is_jmps_and_polyamps(parts: Any) -> None:
    own, theirs = ours.Policy(*parts), real.Policy(*parts)
    assert str(own) == str(theirs)
    assert str(ours.get_policy(str(theirs))) == str(theirs)
    accepted = polyamp.policy(own)
    assert (accepted.param_dtype, accepted.compute_dtype, accepted.output_dtype) == tuple(map(np.dtype, parts))
    tree = {"w": jnp.ones(2), "n": jnp.arange(2), "o": None}
    for cast in ("cast_to_param", "cast_to_compute", "cast_to_output"):
        mapped = (getattr(policy, cast)(tree) for policy in (own, theirs))
        leaves = ([(leaf.dtype, leaf.tolist()) for leaf in jax.tree.leaves(one)] for one in mapped)
        assert next(leaves) == next(leaves)


@pytest.mark.parametrize("text", ["half", "full", "f32", "bfloat16", "c=f16", "p=f16,c=bf16", "o=f16", "c=half,o=full"])
def test_a_text_means_the_same(text: str) -> None:
    assert str(ours.get_policy(text)) == str(real.get_policy(text))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("float", "Unknown dtype"),
        ("x=f16", "Unknown key"),
        ("c=f16,compute=f32", "appears twice"),
        ("c", "Unknown dtyp"),
    ],
)
def test_a_wrong_text_is_refused(text: str, what: str) -> None:
    with pytest.raises(polyamp.PolyampError, match=what):
        ours.get_policy(text)


@pytest.mark.parametrize("dtype", [jnp.int32, "int32", None, 16])
def test_a_dtype_without_a_format_is_refused(dtype: Any) -> None:
    with pytest.raises(polyamp.errors.InvalidTypeError, match="not a floating-point dtype"):
        ours.Policy(jnp.float32, dtype, jnp.float32)


@pytest.mark.parametrize(("period", "factor"), [(0, 2), (2, 1), (2, 0), (2, float("nan")), (1.5, 2)])
def test_settings_outside_their_range_are_refused(period: Any, factor: Any) -> None:
    with pytest.raises(polyamp.PolyampError, match="loss-scale setting"):
        ours.DynamicLossScale(jnp.float32(8), period=period, factor=factor).adjust(jnp.bool_(True))


def test_what_is_not_a_scalar_is_refused() -> None:
    for call in (lambda: ours.select_tree(jnp.ones(1), 1, 1), lambda: ours.select_tree(jnp.float32(1), 1, 1)):
        with pytest.raises(AssertionError, match="expected boolean scalar"):
            call()
    with pytest.raises(polyamp.errors.InvalidTypeError, match="expected boolean scalar"):
        ours.DynamicLossScale(jnp.float32(8)).adjust(jnp.ones(2, bool))


def test_an_integer_scale_is_reported() -> None:
    with pytest.warns(PolyampWarning, match="Expected floating type for loss_scale, got int32"):
        own = ours.DynamicLossScale(jnp.int32(8), period=1)
    assert own.adjust(True).loss_scale == jnp.float32(16)


USES: dict[str, tuple[Any, str]] = {
    "Policy": (lambda: ours.Policy(jnp.float32, jnp.float16, jnp.float32), 'compute="float16"'),
    "get_policy": (lambda: ours.get_policy("half"), "polyamp.policy"),
    "half_dtype": (ours.half_dtype, "compute_dtype"),
    "cast_to_full": (lambda: ours.cast_to_full(1), "cast_to_compute"),
    "cast_to_half": (lambda: ours.cast_to_half(1), "mixed_float16"),
    "NoOpLossScale": (ours.NoOpLossScale, "wrap_optimizer"),
    "StaticLossScale": (lambda: ours.StaticLossScale(2), "LossScale.fixed"),
    "DynamicLossScale": (lambda: ours.DynamicLossScale(2.0), "wrap_optimizer"),
    "all_finite": (lambda: ours.all_finite(1), "last_step.applied"),
    "select_tree": (lambda: ours.select_tree(jnp.bool_(True), None, None), "polyamp.backends.jax.select"),
}


@pytest.mark.parametrize(("use", "instead"), USES.values(), ids=USES)
def test_each_function_shows_the_line_to_write(use: Any, instead: str) -> None:
    with pytest.warns(PolyampDeprecationWarning) as caught:
        _ = [use() for _ in range(2)]
    assert [instead in str(warning.message) for warning in caught] == [True]
    assert caught[0].filename == __file__


def test_the_interface_is_jmps() -> None:
    assert set(ours.__all__) == set(real.__all__) == {*USES, "LossScale"}
    for name in ("DynamicLossScale", "StaticLossScale", "Policy"):
        own, theirs = (inspect.signature(getattr(library, name)) for library in (ours, real))
        assert list(own.parameters) == list(theirs.parameters)


TASK = digits_task(steps=40)


def trained(jmp: Any, words: str, scale: Any, skip: bool) -> tuple[list[float], list[float]]:
    """Train digits by jmp's classic recipe; return the losses and the loss scales."""
    policy = jmp.get_policy(words)
    hk.mixed_precision.set_policy(hk.Linear, policy)
    tx = optax.adam(1e-2)

    @hk.without_apply_rng
    @hk.transform
    def model(x: Any) -> Any:
        x = hk.Flatten()(x)
        return hk.Linear(10)(jax.nn.relu(hk.Linear(32)(x)))

    def loss_fn(params: Any, loss_scale: Any, x: Any, y: Any) -> Any:
        logits = model.apply(params, x)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return loss_scale.scale(loss), loss

    @jax.jit
    def step(params: Any, opt_state: Any, loss_scale: Any, x: Any, y: Any) -> Any:
        grads, loss = jax.grad(loss_fn, has_aux=True)(params, loss_scale, x, y)
        grads = policy.cast_to_param(loss_scale.unscale(policy.cast_to_compute(grads)))
        updates, new_opt = tx.update(grads, opt_state)
        new = optax.apply_updates(params, updates)
        if skip:
            finite = jmp.all_finite(grads)
            loss_scale = loss_scale.adjust(finite)
            new, new_opt = jmp.select_tree(finite, (new, new_opt), (params, opt_state))
        return new, new_opt, loss_scale, jmp.cast_to_full(loss)

    try:
        x, y = TASK.train_images, TASK.train_labels
        params = model.init(jax.random.key(0), x[:2])
        held = params, tx.init(params), scale(jmp)
        losses, seen = [], []
        for chosen in TASK.batches:
            *held, loss = step(*held, x[chosen], y[chosen])
            losses.append(float(loss))
            seen.append(float(held[2].loss_scale))
        return losses, seen
    finally:
        hk.mixed_precision.clear_policy(hk.Linear)


CASES: dict[str, tuple[str, Any, bool]] = {
    "bfloat16": ("p=f32,c=bf16,o=f32", lambda jmp: jmp.NoOpLossScale(), False),
    "float16, fixed": ("p=f32,c=f16,o=f32", lambda jmp: jmp.StaticLossScale(np.float32(2**10)), False),
    "float16, dynamic": ("p=f32,c=f16,o=f32", lambda jmp: jmp.DynamicLossScale(jnp.float32(2**20), period=10), True),
}


@pytest.mark.parametrize(("words", "scale", "skip"), CASES.values(), ids=CASES)
def test_the_classic_recipe_trains_bit_for_bit_as_with_jmp(words: str, scale: Any, skip: bool) -> None:
    own, theirs = trained(ours, words, scale, skip), trained(real, words, scale, skip)
    assert own == theirs
    assert own[0][-1] < 0.6 * own[0][0]
    assert not skip or len(set(own[1])) > 2  # it overflowed and grew
