"""equinox and diffrax: their models, checkpointed loops and solvers under autocast, in value_and_grad and in plans."""

from __future__ import annotations

from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equinox.internal import while_loop

import polyamp
import polyamp.backends.jax as amp

LOW = ["mixed_float16", "mixed_bfloat16"]
SOLVERS = {"Euler": diffrax.Euler, "Tsit5": diffrax.Tsit5, "Kvaerno3": diffrax.Kvaerno3}
ADJOINTS = {
    "checkpointed": diffrax.RecursiveCheckpointAdjoint,
    "direct": diffrax.DirectAdjoint,
    "backsolve": diffrax.BacksolveAdjoint,
}


class Field(eqx.Module):
    layers: eqx.nn.MLP

    def __init__(self) -> None:
        self.layers = eqx.nn.MLP(4, 4, 16, 1, activation=jax.nn.tanh, key=jax.random.key(0))

    def __call__(self, t: Any, y: Any, args: Any) -> Any:
        return jax.vmap(self.layers)(y)


def solved(field: Field, y: Any, solver: str = "Tsit5", adjoint: str = "checkpointed") -> Any:
    steps = diffrax.ConstantStepSize() if solver == "Euler" else diffrax.PIDController(rtol=1e-2, atol=1e-2)
    found = diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        SOLVERS[solver](),
        t0=0.0,
        t1=1.0,
        dt0=0.25,
        y0=y,
        stepsize_controller=steps,
        adjoint=ADJOINTS[adjoint](),
        max_steps=64,
        throw=False,
    )
    return jnp.square(found.ys).mean()


FIELD, Y = Field(), jax.random.normal(jax.random.key(1), (8, 4))
STATE = polyamp.wrap_optimizer(optax.adam(1e-2), "mixed_float16").init(eqx.filter(FIELD, eqx.is_inexact_array))


def flat(tree: Any) -> Any:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def low_products(program: Any, *args: Any) -> int:
    """Return how many products of a program are in 16 bits, at any depth; the text has each function once."""
    text = str(jax.make_jaxpr(program)(*args))
    return text.count("preferred_element_type=float16") + text.count("preferred_element_type=bfloat16")


@pytest.mark.parametrize(
    ("solver", "adjoint"),
    [("Tsit5", "checkpointed"), ("Euler", "checkpointed"), ("Kvaerno3", "checkpointed"), ("Tsit5", "direct")],
)
def test_a_solver_is_lowered_forward_and_backward(solver: str, adjoint: str) -> None:
    def loss(field: Any, y: Any) -> Any:
        return solved(field, y, solver, adjoint)

    def step(trained: Any, y: Any) -> Any:
        field = eqx.combine(trained, FIELD)
        return amp.value_and_grad(loss, "mixed_float16")(STATE, field, y)

    trained = eqx.filter(FIELD, eqx.is_inexact_array)
    value, grads = jax.jit(step)(trained, Y)
    exact, exact_grads = eqx.filter_jit(eqx.filter_value_and_grad(loss))(FIELD, Y)
    assert float(value) == pytest.approx(float(exact), rel=1e-2)
    scaled = flat(grads) / 65536
    assert np.linalg.norm(scaled - flat(exact_grads)) < 2e-2 * np.linalg.norm(flat(exact_grads))
    assert low_products(step, trained, Y) >= 2
    formats = {op.format for op in polyamp.explain(step, trained, Y, policy="mixed_float16").operations}
    assert "float16" in formats


@pytest.mark.parametrize("policy", LOW)
def test_a_checkpointed_loop_is_entered(policy: str) -> None:
    def loss(w: Any, x: Any) -> Any:
        last = while_loop(
            lambda carry: carry[0] < 3,
            lambda carry: (carry[0] + 1, jnp.tanh(carry[1] @ w)),
            (0, x),
            kind="checkpointed",
            max_steps=4,
        )
        return jnp.square(last[1]).sum()

    w, x = jax.random.normal(jax.random.key(2), (4, 4)), Y
    found = jax.jit(jax.grad(polyamp.autocast(loss, policy)))(w, x)
    exact = jax.grad(loss)(w, x)
    assert np.linalg.norm(found - exact) < 3e-2 * np.linalg.norm(exact)
    assert low_products(jax.grad(polyamp.autocast(loss, policy)), w, x) >= 2
