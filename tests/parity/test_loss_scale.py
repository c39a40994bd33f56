"""The one loss-scale rule takes the same steps in every framework, to the bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from polyamp import LossScale, LossScaleState, advance
from support.loss_scale_cases import TRACES, any_numbers, powers_of_two, walk

Trace = list[bool]
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
