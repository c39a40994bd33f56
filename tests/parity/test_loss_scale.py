"""The one loss-scale rule takes the same steps in every framework, to the bit."""

import functools
import math
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
import tensorflow as tf
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import polyamp
from polyamp import LossScale, LossScaleState, advance
from polyamp.backends.tensorflow import LossScaler
from polyamp.scale import on_host
from support.loss_scale_cases import TRACES, any_numbers, powers_of_two, walk

Trace = list[bool]
DTYPES = LossScaleState("float32", *["int32"] * 8, "float32")


def made(state: LossScaleState, make: Callable[[float, str], Any]) -> LossScaleState:
    return LossScaleState(*map(make, state, DTYPES))


def torch_states(config: LossScale, trace: Trace, state: LossScaleState) -> list[LossScaleState]:
    state = made(state, lambda value, kind: torch.tensor(value, dtype=getattr(torch, kind)))
    return walk(config, map(torch.tensor, trace), state, where=torch.where)


def jax_states(config: LossScale, trace: Trace, state: LossScaleState) -> list[LossScaleState]:
    state = made(state, jnp.array)

    @jax.jit
    def run(state: LossScaleState, trace: Any) -> Any:
        def step(state: LossScaleState, finite: Any) -> tuple[LossScaleState, LossScaleState]:
            state = advance(config, state, finite, where=jnp.where)
            return state, state

        return jax.lax.scan(step, state, trace)[1]  # fails to trace if a dtype changes

    states = run(state, np.array(trace))
    return [LossScaleState(*fields) for fields in zip(*states, strict=True)]


def tensorflow_states(config: LossScale, trace: Trace, state: LossScaleState) -> list[LossScaleState]:
    state = made(state, tf.constant)
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
    states = STATES[framework](config, trace, config.initial_state())
    assert list(map(bits, states)) == list(map(bits, walk(config, trace)))
    assert tuple(str(np.asarray(field).dtype) for field in states[-1]) == DTYPES


# --- a state that a damaged file replaced -----------------------------------------------------------------------------

WRONG = [0.0, -8.0, math.nan, math.inf, 2.0**100]
LIMITED = LossScale(init=8.0, max=2.0**10)
Run = tuple[list[Any], Any]


def jax_run(scale: float) -> Run:
    tx = polyamp.wrap_optimizer(optax.sgd(0.5), "mixed_float16", loss_scale=LIMITED)
    params, weights = jnp.ones(2), []
    state = tx.init(params)._replace(loss_scale=jnp.float32(scale))
    for _ in range(3):
        grads = jax.grad(lambda p, state=state: polyamp.scale_loss(p.sum() / 4, state))(params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        weights.append(float(params[0]))
    return weights, state


def keras_run(scale: float) -> Run:
    opt = polyamp.wrap_optimizer(keras.optimizers.SGD(0.5), "mixed_float16", loss_scale=LIMITED)
    weight, weights = tf.Variable(tf.ones(2)), []
    opt.build([weight])
    opt.dynamic_scale.assign(scale)
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = opt.scale_loss(tf.reduce_sum(weight) / 4)
        opt.apply([tape.gradient(loss, weight)], [weight])
        weights.append(float(weight[0]))
    return weights, opt


def tensorflow_run(scale: float) -> Run:
    scaler = LossScaler(LIMITED)
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.5)
    weight, weights = tf.Variable(tf.ones(2)), []
    scaler.variables[0].assign(scale)  # as tf.train.Checkpoint does
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = scaler.scale(tf.reduce_sum(weight) / 4)
        scaler.step(optimizer, [(tape.gradient(loss, weight), weight)])
        weights.append(float(weight[0]))
    return weights, scaler


@pytest.mark.parametrize("scale", WRONG)
@pytest.mark.parametrize("run", [jax_run, keras_run, tensorflow_run])
def test_a_scale_that_cannot_divide_is_skipped_and_comes_back(run: Callable[[float], Run], scale: float) -> None:
    weights, holder = run(scale)
    can_divide = 0 < scale < math.inf
    first = 0.875 if can_divide and LIMITED.max < scale else 1.0
    assert weights == [first, first - 0.125, first - 0.25]
    found = polyamp.health(holder)
    assert LIMITED.min <= found.scale <= LIMITED.max
    assert found.skipped == (not can_divide)


def test_pytorch_refuses_such_a_scale_in_a_pickle() -> None:
    opt = polyamp.wrap_optimizer(torch.optim.SGD([torch.ones(2, requires_grad=True)], 0.5), "mixed_float16")
    opt.scaler.state = opt.scaler.state._replace(scale=0.0)
    with pytest.raises(polyamp.errors.StateError, match="outside"):
        pickle.loads(pickle.dumps(opt.scaler))


@pytest.mark.parametrize("framework", STATES)
def test_counters_stay_at_their_limit(framework: str) -> None:
    config = LossScale(interval=2**31 - 1)
    full = LossScaleState(8.0, *[2**31 - 1] * 8, 8.0)
    for finite in (True, False):
        (state,) = STATES[framework](config, [finite], full)
        assert bits(state) == bits(advance(config, full, finite))
        assert set(on_host(state)[4:6]) == {2**31 - 1}


LAST_STEPS: dict[str, Callable[[str], polyamp.StepResult]] = {
    "torch": lambda name: polyamp.wrap_optimizer(torch.optim.SGD([torch.ones(1, requires_grad=True)]), name).last_step,
    "jax": lambda name: polyamp.wrap_optimizer(optax.sgd(0.1), name).init({"w": jnp.ones(1)}).last_step,
    "keras": lambda name: polyamp.wrap_optimizer(keras.optimizers.SGD(0.1), name).last_step,
    "tensorflow": lambda name: LossScaler(name).last_step,
}


@pytest.mark.parametrize("name", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("framework", LAST_STEPS)
def test_no_step_is_claimed_before_the_first(framework: str, name: str) -> None:
    last = LAST_STEPS[framework](name)
    assert (bool(last), last.was_skipped, last.reason) == (False, False, "no step was made yet")
