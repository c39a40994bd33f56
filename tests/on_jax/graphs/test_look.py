"""What is known of values before a program runs: which are equal, and what their readers ask of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import polyamp
from support.jax_scenarios import normal, relative_error
from support.jax_scenarios import quickly_compiled as quickly_compiled

BF16, F16 = "mixed_bfloat16", "mixed_float16"
W, X = normal(0, 8, 8), normal(1, 6, 8)
_chosen = jax.jit(lambda where, y: jnp.where(where, y, 0.0) * 1.0)
_total = jax.jit(lambda y: y.sum() * 1e-3)


def test_equal_values_share_a_cast() -> None:
    def loss(w: Any, x: Any) -> Any:  # the gradients of both halves cancel
        mean, scale = x @ w[0], x @ w[1]
        upper = jax.nn.sigmoid((x - mean + 0.004) * jnp.exp(-scale))
        return -jnp.log(upper - jax.nn.sigmoid((x - mean - 0.004) * jnp.exp(-scale)) + 1e-12).mean()

    w, x = normal(0, 2, 8, 8, scale=0.3), normal(1, 64, 8)
    mixed, plain = (jax.jit(jax.grad(fn)) for fn in (polyamp.autocast(loss, F16), loss))
    assert relative_error(mixed(w, x)[1], plain(w, x)[1]) < 5e-3


READ_IN_FULL: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda a, b: (a * b).sum(-1),
    "moved": lambda a, b: -(a * b).reshape(-1).mean(),
    "in jit": lambda a, b: jax.jit(lambda p: jnp.where(p > 0, p, 0.0).sum())(a * b),
    "in a checkpoint": lambda a, b: jax.checkpoint(lambda a, b: (a * b).sum())(a, b),
    "through relu": lambda a, b: jax.nn.relu(a * b).sum(),
    "by a function called twice": lambda a, b: _total(a * b) * _total(b * b * 0.5),
    "in a loop": lambda a, b: lax.map(lambda rows: (rows[0] * rows[1]).sum(), (a, b)),
    "a determinant": lambda a, b: a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0],
}
OTHERS: dict[str, Callable[[Any, Any], Any]] = {
    "returned": lambda a, b: (a * b, (a * b).sum()),
    "a product": lambda a, b: (lambda p: p.sum() + (p @ b.T).sum())(a * b),
    "once": lambda a, b: (lambda p: _chosen(a > b, p).sum() + (_chosen(a < b, p) @ b.T).sum())(a * b),
    "out of a loop": lambda a, b: lax.map(lambda rows: rows[0] * rows[1], (a, b)).sum(),
}


@pytest.mark.parametrize("reader", [*READ_IN_FULL, *OTHERS])
def test_a_product_that_full_work_alone_reads_is_float32(reader: str) -> None:
    def fn(w: Any, x: Any) -> Any:
        return (READ_IN_FULL | OTHERS)[reader](x @ w, x[::-1] @ w)

    plan = polyamp.explain(fn, W, X, policy=F16)
    assert ("mul", "float32") in {(op.name, op.format) for op in plan.operations} or reader in OTHERS
    if reader in READ_IN_FULL:
        large = W * 512
        assert relative_error(jax.jit(polyamp.autocast(fn, F16))(large, X), fn(large, X)) < 2e-3
    else:
        assert ("mul", "float16") in {(op.name, op.format) for op in plan.operations}


STATES: dict[str, Callable[[Any, Any], Any]] = {
    "decayed": lambda s, y: 0.999 * s + 0.001 * y,
    "by a step": lambda s, y: s + (y - s) * 0.001,
    "stopped": lambda s, y: s - 0.001 * (s - lax.stop_gradient(y)),
    "in jit": jax.jit(lambda s, y: jnp.where(y.sum() > 0, 0.999 * s + 0.001 * y, s)),
    "clipped": lambda s, y: jnp.clip(0.999 * s + 0.001 * y, 0, 10),
    "flat": lambda s, y: (0.999 * s.reshape(-1) + 0.001 * y.reshape(-1)).reshape(8, 8),
    "in two parts": lambda s, y: jnp.concatenate([_average(s[:4], y[:4]), _average(s[4:], y[4:])]),
    "by rows": lambda s, y: lax.fori_loop(0, 8, lambda i, s: s.at[i].set(0.999 * s[i] + 0.001 * y[i]), s),
    "a row": lambda s, y: s.at[0].set(0.999 * s[0] + 0.001 * y[0]).at[1:].set(0.999 * s[1:] + 0.001 * y[1:]),
    "in a scan": lambda s, y: lax.scan(lambda _, pair: (None, 0.999 * pair[0] + 0.001 * pair[1]), None, (s, y))[1],
    "in a branch": lambda s, y: lax.cond(y.sum() > 0, lambda: 0.999 * s + 0.001 * y, lambda: s),
}


@jax.jit
def _average(s: Any, y: Any) -> Any:
    return 0.999 * s + 0.001 * y


@pytest.mark.parametrize("policy", [BF16, F16])
@pytest.mark.parametrize("update", STATES)
def test_a_state_of_the_first_argument_that_is_returned_accumulates(update: str, policy: str) -> None:
    def step(variables: Any, x: Any) -> Any:
        y = x @ variables["w"]
        return y.sum(), {"w": variables["w"], "average": STATES[update](variables["average"], y)}

    mixed, variables = jax.jit(polyamp.autocast(step, policy)), {"w": jnp.eye(8), "average": jnp.ones((8, 8))}
    for _ in range(100):
        _, variables = mixed(variables, jnp.full((8, 8), 1.2))
    np.testing.assert_allclose(variables["average"], 1.2 - 0.2 * 0.999**100, rtol=1e-3)


def window(made: str) -> Any:
    if made == "of numbers":
        return jnp.full((3, 3, 1, 1), 1 / 9)
    bell = jnp.exp(-((jnp.arange(3) - 1.0) ** 2))
    return jnp.outer(bell, bell)[:, :, None, None] / jnp.outer(bell, bell).sum()


@pytest.mark.parametrize("policy", [BF16, F16])
@pytest.mark.parametrize("made", ["of numbers", "of positions", "a pool"])
def test_full_work_reads_averages_unrounded(made: str, policy: str) -> None:
    def mean(y: Any) -> Any:
        if made == "a pool":
            return lax.reduce_window(y, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "VALID") / 9
        return lax.conv_general_dilated(y, window(made), (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def variance(w: Any, x: Any) -> Any:
        y = x @ w
        return mean(y * y) - mean(y) ** 2

    x = (0.4 + 0.2 * np.random.default_rng(0).random((1, 8, 8, 1))).astype(jnp.bfloat16).astype(np.float32)
    x, w = np.repeat(x, 2, axis=-1), jnp.full((2, 1), 0.5)  # of one channel the product would sum nothing
    assert relative_error(polyamp.autocast(variance, policy)(w, x), variance(w, x)) < 1e-3
