"""`LossScale.like` against the real libraries, and the one rule against itself in every framework."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from typing import Any

import flax.training.dynamic_scale
import jax
import jax.numpy as jnp
import jmp
import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from polyamp import LossScale, LossScaleState, advance
from polyamp.loss_scale import on_host
from polyamp.testing import overflow_trace
from support.loss_scale_cases import TRACES, any_numbers, powers_of_two, walk

Trace = list[bool]

# --- the real libraries, each driven as its users drive it ------------------------------------------------------------


def torch_scales(trace: Trace, init: float = 2.0**16, interval: int = 2000, **factors: float) -> list[float]:
    names = {"growth": "growth_factor", "backoff": "backoff_factor"}
    factors = {names[name]: value for name, value in factors.items()}
    scaler = torch.amp.GradScaler("cpu", init_scale=init, growth_interval=interval, **factors)
    param = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([param], lr=0.1)
    scales = []
    for finite in trace:
        scaler.scale(torch.ones(()))
        param.grad = torch.tensor([1.0, 1.0 if finite else math.inf])
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def keras_scales(trace: Trace, init: float = 2.0**15, interval: int = 2000) -> list[float]:
    inner = keras.optimizers.SGD(0.0)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=init, dynamic_growth_steps=interval)
    weight = keras.Variable(np.zeros(2, np.float32))
    optimizer.build([weight])
    scales = []
    for finite in trace:
        optimizer.apply([keras.ops.array([1.0, 1.0 if finite else math.nan])])
        scales.append(float(keras.ops.convert_to_tensor(optimizer.dynamic_scale)))
    return scales


def tensorflow_scales(trace: Trace, init: float = 2.0**15, interval: int = 2000, growth: float = 2.0) -> list[float]:
    scale = tf.compat.v1.mixed_precision.DynamicLossScale(init, interval, growth)
    scales = []
    for finite in trace:
        scale.update([tf.constant([1.0, 1.0 if finite else -math.inf])])
        scales.append(float(scale()))
    return scales


def flax_scales(trace: Trace, **settings: Any) -> list[float]:
    names = {"init": "scale", "interval": "growth_interval", "growth": "growth_factor", "backoff": "backoff_factor"}
    settings = {names[name]: value for name, value in settings.items()}
    start = flax.training.dynamic_scale.DynamicScale(**settings)
    state = start.replace(scale=jnp.float32(start.scale), fin_steps=jnp.int32(0))

    def step(state: Any, slope: Any) -> Any:
        state = state.value_and_grad(lambda x: x * slope)(jnp.float32(0.0))[0]
        return state, state.scale

    slopes = jnp.where(np.array(trace), 1.0, jnp.nan)
    return list(map(float, jax.lax.scan(step, state, slopes)[1]))


def jmp_scales(
    trace: Trace, init: float = 2.0**15, interval: int = 2000, growth: float = 2.0, min: float = 1.0
) -> list[float]:
    scale = jmp.DynamicLossScale(
        jnp.float32(init),
        period=interval,
        factor=growth,
        min_loss_scale=jnp.float32(min),  # type: ignore[arg-type]
    )
    scales = []
    for finite in trace:
        scale = scale.adjust(jnp.bool_(finite))
        scales.append(float(scale.loss_scale))
    return scales


LIBRARIES: dict[str, Callable[..., list[float]]] = {
    "torch": torch_scales,
    "keras": keras_scales,
    "tensorflow": tensorflow_scales,
    "flax": flax_scales,
    "jmp": jmp_scales,
}


def our_scales(name: str, trace: Trace, **settings: Any) -> list[float]:
    return [state.scale for state in walk(LossScale.like(name, **settings), trace)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("interval", [1, 2, 3, 7])
@pytest.mark.parametrize("name", LIBRARIES)
def test_presets_follow_the_library(name: str, interval: int, seed: int) -> None:
    share = random.Random(seed).choice([0.05, 0.2, 0.4])
    trace = overflow_trace(seed, 60, share)
    assert our_scales(name, trace, interval=interval) == LIBRARIES[name](trace, interval=interval)


@pytest.mark.parametrize("init", [2.0**-3, 1.0, 1000.0, 2.0**24, 2.0**30])
@pytest.mark.parametrize("name", ["torch", "keras", "flax"])
def test_presets_follow_from_any_start(name: str, init: float) -> None:
    trace = overflow_trace(3, 60)
    assert our_scales(name, trace, interval=2, init=init) == LIBRARIES[name](trace, interval=2, init=init)


@pytest.mark.parametrize(
    ("name", "factors"),
    [
        ("torch", {"growth": 4.0, "backoff": 0.125}),
        ("torch", {"growth": 1.5, "backoff": 0.75}),
        ("torch", {"growth": 1.7, "backoff": 0.3}),
        ("flax", {"growth": 4.0, "backoff": 0.25}),
        ("flax", {"growth": 1.5, "backoff": 0.75}),
        ("tensorflow", {"growth": 4.0}),
        ("jmp", {"growth": 4.0}),
        ("jmp", {"min": 2.0**-10}),
    ],
    ids=str,
)
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_presets_follow_with_other_factors(name: str, factors: dict[str, float], share: float) -> None:
    trace = overflow_trace(1, 40, share)
    theirs = LIBRARIES[name](trace, interval=2, **factors)
    changes = factors | (
        {"backoff": 1 / factors["growth"]} if set(factors) == {"growth"} else {}
    )  # one factor for both
    assert our_scales(name, trace, interval=2, **changes) == theirs


@pytest.mark.parametrize("name", LIBRARIES)
def test_presets_start_with_the_library_s_own_defaults(name: str) -> None:
    trace = [True] * 2002 + [False]
    assert our_scales(name, trace) == LIBRARIES[name](trace)


# --- limits: the library's own to the last update that float32 can divide by ------------------------------------------


@pytest.mark.parametrize("name", LIBRARIES)
def test_overflows_lead_down_to_the_library_s_own_minimum(name: str) -> None:
    trace = [False] * 130 + [True] * 10
    assert our_scales(name, trace, interval=1) == LIBRARIES[name](trace, interval=1)


@pytest.mark.parametrize("name", ["torch", "tensorflow", "flax", "jmp"])
def test_growth_leads_up_to_the_library_s_own_maximum(name: str) -> None:
    trace = [True] * 130 + [False] * 10 + [True] * 20
    assert our_scales(name, trace, interval=1) == LIBRARIES[name](trace, interval=1)


@pytest.mark.parametrize(("name", "init"), [("torch", 2.0**16), ("keras", 2.0**15)])
def test_where_a_library_collapses_to_zero_we_stop(name: str, init: float) -> None:
    trace = [False] * 300
    theirs, ours = LIBRARIES[name](trace, init=init), our_scales(name, trace, init=init)
    assert theirs[-1] == 0.0
    assert ours[-1] == 2.0**-126
    assert math.isfinite(1 / np.float32(ours[-1]))
    assert all(mine == max(scale, 2.0**-126) for mine, scale in zip(ours, theirs, strict=True))


def test_where_a_library_grows_to_infinity_we_stop() -> None:
    trace = [True] * 200 + [False] * 3
    theirs, ours = keras_scales(trace, interval=1), our_scales("keras", trace, interval=1)
    assert theirs[-1] == math.inf
    assert ours[199] == 2.0**127
    assert ours[-1] == 2.0**124
    assert all(mine == min(scale, 2.0**127) for mine, scale in zip(ours[:200], theirs[:200], strict=True))


# --- one rule, many number types --------------------------------------------------------------------------------------

DTYPES = LossScaleState("float32", *["int32"] * 8, "float32")


def initial_state(config: LossScale, make: Callable[[float, str], Any]) -> LossScaleState:
    return LossScaleState(*map(make, config.initial_state(), DTYPES))


def torch_states(config: LossScale, trace: Trace) -> list[LossScaleState]:
    state = initial_state(config, lambda value, kind: torch.tensor(value, dtype=getattr(torch, kind)))
    return walk(config, map(torch.tensor, trace), state, where=torch.where)


def jax_states(config: LossScale, trace: Trace) -> list[LossScaleState]:
    state = initial_state(config, jnp.array)

    @jax.jit
    def run(state: LossScaleState, trace: Any) -> Any:
        def step(state: LossScaleState, finite: Any) -> tuple[LossScaleState, LossScaleState]:
            state = advance(config, state, finite, where=jnp.where)
            return state, state

        return jax.lax.scan(step, state, trace)[1]  # fails to trace if a dtype changes

    states = run(state, np.array(trace))
    return [LossScaleState(*fields) for fields in zip(*states, strict=True)]


def tensorflow_states(config: LossScale, trace: Trace) -> list[LossScaleState]:
    state = initial_state(config, tf.constant)
    step = tf.function(functools.partial(advance, config, where=tf.where))
    states = []
    for finite in trace:
        state = step(state, tf.constant(finite))
        states.append(state)
    return states


def bits(state: LossScaleState) -> list[bytes]:
    """Return each field's bytes, from any framework's scalars; Python numbers as float32 and int32."""
    arrays = [np.asarray(field) for field in state]
    return [array.astype("float32" if array.dtype.kind == "f" else "int32").tobytes() for array in arrays]


STATES = {"torch": torch_states, "jax": jax_states, "tensorflow": tensorflow_states}


@pytest.mark.parametrize("framework", STATES)
@hypothesis_settings(max_examples=15, deadline=None)  # each example compiles again
@given(config=st.one_of(powers_of_two(), any_numbers()), trace=TRACES)
def test_every_framework_takes_the_same_steps_to_the_bit(framework: str, config: LossScale, trace: Trace) -> None:
    config = config.in_float32()
    states = STATES[framework](config, trace)
    assert list(map(bits, states)) == list(map(bits, walk(config, trace)))
    assert tuple(str(np.asarray(field).dtype) for field in states[-1]) == DTYPES


@pytest.mark.parametrize(
    "config", [LossScale.fixed(96.0), LossScale.none(), LossScale.like("flax", init=2.0**127, interval=1)], ids=repr
)
@pytest.mark.parametrize("framework", STATES)
def test_special_settings_too(framework: str, config: LossScale) -> None:
    trace = overflow_trace(0, 20)
    assert list(map(on_host, STATES[framework](config, trace))) == walk(config, trace)


@pytest.mark.parametrize("framework", STATES)
@hypothesis_settings(max_examples=10, deadline=None)
@given(config=powers_of_two(), first=TRACES, then=TRACES)
def test_a_state_continues_in_another_framework(framework: str, config: LossScale, first: Trace, then: Trace) -> None:
    saved = config.to_state_dict(STATES[framework](config, first)[-1])
    assert walk(config, then, config.from_state_dict(saved)) == walk(config, first + then)[len(first) :]
