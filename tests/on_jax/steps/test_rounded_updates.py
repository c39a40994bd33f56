"""A control that rounds updates reaches every way in which optax optimizers step, compiled or not."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import polyamp
from polyamp.backends.jax import apply_gradients
from polyamp.controls import broken, for_policy
from polyamp.errors import UsageError
from polyamp.testing import same_bits

SMALL, LARGE = -(2.0**-12), -(2.0**-10)


def wrapped(tx: Any = None, policy: str = "mixed_float16", **options: Any) -> Any:
    with broken(for_policy(policy)[-1]) as tally:
        opt = polyamp.wrap_optimizer(optax.sgd(1.0) if tx is None else tx, policy, **options)
    assert tally.reached == 1
    return opt


def updated(tx: Any, grads: Any, state: Any, params: Any) -> Any:
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


WAYS = {"update": updated, "apply": apply_gradients}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("skip", ["cond", "select"])
@pytest.mark.parametrize("compiled", [True, False])
def test_every_way_to_step(way: str, skip: str, compiled: bool) -> None:
    tx = wrapped(skip=skip, max_grad_norm=1.0)
    params = {"w": jnp.ones(2), "count": None}
    state = tx.init(params)
    step = functools.partial(WAYS[way], tx)
    run = jax.jit(step) if compiled else step
    for steps in (1, 2):
        grads = {"w": jnp.array([SMALL, LARGE]) * state.loss_scale, "count": None}
        params, state = run(grads, state, params)
        assert params["w"].tolist() == [1.0, 1.0 - steps * LARGE]
    before = params
    params, state = run({"w": jnp.array([jnp.nan, 1.0]), "count": None}, state, params)
    assert not state.last_step.applied
    assert same_bits({"w": np.asarray(params["w"])}, {"w": np.asarray(before["w"])})


def test_updates_without_parameters_are_refused() -> None:
    tx = wrapped()
    with pytest.raises(UsageError, match="pass the parameters"):
        tx.update({"w": jnp.ones(2)}, tx.init({"w": jnp.ones(2)}))
