"""polyamp.watch around a JAX step, whose optimizer state is a value: its arguments, and the facts that it reads."""

from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import polyamp
from support.jax_scenarios import quickly_compiled as quickly_compiled

pytestmark = pytest.mark.slow

POLICY = polyamp.policy("mixed_float16", loss_scale=polyamp.LossScale(init=2.0**4))
TX = polyamp.wrap_optimizer(optax.sgd(0.1), POLICY)
PARAMS = {"w": jnp.ones((4, 2))}
BATCH = jnp.full((8, 4), 1e4)  # squares of its products are beyond float16, and a smaller scale does not help


def loss_fn(params: Any, x: Any) -> Any:
    h = x @ params["w"]
    return ((h @ h.T) @ h).mean()


def step(params: Any, opt_state: Any, x: Any) -> Any:
    loss, grads = polyamp.value_and_grad(loss_fn, POLICY)(opt_state, params, x)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


HOLDERS = {"optimizer": lambda: TX, "state": lambda: TX.init(PARAMS), "none": lambda: None}


@pytest.mark.parametrize(
    ("holder", "shown", "compiled"),
    [("optimizer", True, True), ("state", True, False), ("none", True, True), *((one, False, True) for one in HOLDERS)],
)
def test_it_follows_the_state_among_the_arguments_or_in_the_result(holder: str, shown: bool, compiled: bool) -> None:
    verdicts: list[Any] = []
    held, plain = [PARAMS, TX.init(PARAMS)], jax.jit(step) if compiled else step
    fn = plain if shown else lambda x: plain(*held, x)
    watched = polyamp.watch(fn, HOLDERS[holder](), after=2, on_verdict=verdicts.append, policy=POLICY)
    with nullcontext() if compiled else pytest.warns(polyamp.PolyampWarning, match="not finite before scaling"):
        for _ in range(6):
            held[:] = watched(*(held if shown else ()), BATCH)[:2]
    assert held[1].last_step.skipped_in_a_row == 6
    assert [verdict.kind for verdict in verdicts] == ["forward"]


def test_a_step_without_any_state_is_told_what_to_do() -> None:
    watched = polyamp.watch(lambda x: x, TX, after=1)
    with pytest.raises(polyamp.errors.UsageError, match="let the step take and return its state"):
        watched(BATCH)
