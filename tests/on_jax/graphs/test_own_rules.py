"""Derivative rules with symbolic zeros, equinox's rules and rules for vmap run under the flow rule as others do."""

from __future__ import annotations

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyamp


def with_zeros_vjp(told: bool) -> Any:
    @jax.custom_vjp
    def product(w: Any, x: Any, shift: Any) -> Any:
        return x @ w + shift, x * 2

    def forward(w: Any, x: Any, shift: Any) -> Any:
        if told:
            assert (w.perturbed, x.perturbed, shift.perturbed) == (True, False, False)
            w, x, shift = w.value, x.value, shift.value
        return (x @ w + shift, x * 2), (w, x)

    def backward(kept: Any, cotangents: Any) -> Any:
        if told:
            assert isinstance(cotangents[1], jax.custom_derivatives.SymbolicZero)
            assert cotangents[1].dtype == jnp.float32
        return kept[1].T @ cotangents[0], None, None

    product.defvjp(forward, backward, symbolic_zeros=told)
    return lambda w, x: product(w, x, 1.0)[0]


def with_zeros_jvp(told: bool) -> Any:
    @jax.custom_jvp
    def product(w: Any, x: Any) -> Any:
        return x @ w, x + 1

    @functools.partial(product.defjvp, symbolic_zeros=told)
    def rule(primals: Any, tangents: Any) -> Any:
        (w, x), (dw, dx) = primals, tangents
        if not told:
            return (x @ w, x + 1), (x @ dw + dx @ w, dx)
        assert isinstance(dx, jax.custom_derivatives.SymbolicZero)
        assert dx.dtype == jnp.float32
        return (x @ w, x + 1), (x @ dw, dx)

    return lambda w, x: product(w, x)[0]


def by_equinox(told: bool) -> Any:
    @eqx.filter_custom_vjp
    def product(w: Any, x: Any) -> Any:
        return x @ w

    product.def_fwd(lambda perturbed, w, x: (x @ w, x))
    product.def_bwd(lambda kept, cotangent, perturbed, w, x: kept.T @ cotangent)
    return product


def remembering(told: bool) -> Any:
    @jax.custom_vjp
    def product(w: Any, x: Any) -> Any:
        return x @ w

    product.defvjp(lambda w, x: (x @ w, (w, x)), lambda kept, g: (kept[1].T @ g, g @ kept[0].T), optimize_remat=told)
    return product


def batched_by_hand(told: bool) -> Any:
    """``custom_vmap`` does not have a reverse derivative, so it is inside a custom one."""

    @jax.custom_batching.custom_vmap
    def plain(w: Any, x: Any) -> Any:
        return x @ w

    @plain.def_vmap
    def rule(size: int, batched: Any, w: Any, x: Any) -> Any:
        return x @ w, True

    product = jax.custom_vjp(plain)
    product.defvjp(lambda w, x: (plain(w, x), x), lambda x, g: (x.T @ g, None))
    return product


RULES = {
    "custom_vjp": with_zeros_vjp,
    "custom_jvp": with_zeros_jvp,
    "equinox": by_equinox,
    "optimize_remat": remembering,
    "custom_vmap": batched_by_hand,
}


@pytest.mark.parametrize(("told", "compiled"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("name", RULES)
def test_every_kind_of_own_rule_is_entered(name: str, told: bool, compiled: bool) -> None:
    product = RULES[name](told)
    w, x = jax.random.normal(jax.random.key(0), (8, 8)) / 3, jax.random.normal(jax.random.key(1), (4, 8))

    def loss(w: Any, x: Any) -> Any:
        return jnp.square(product(w, x)).sum()

    autocasted = jax.grad(polyamp.autocast(loss, "mixed_float16"))
    found = (jax.jit(autocasted) if compiled else autocasted)(w, x)
    exact = jax.grad(loss)(w, x)
    assert found.dtype == jnp.float32
    assert np.linalg.norm(found - exact) < 2e-3 * np.linalg.norm(exact)
    text = str(jax.make_jaxpr(autocasted)(w, x))
    assert text.count("dot_general") == text.count("preferred_element_type=float16") >= 2  # forward and backward
    formats = [
        op.format for op in polyamp.explain(loss, w, x, policy="mixed_float16").operations if op.name == "matmul"
    ]
    assert formats == ["float16"]


def test_a_rule_for_vmap_is_used_and_lowered() -> None:
    used = []

    @jax.custom_batching.custom_vmap
    def product(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w)

    @product.def_vmap
    def rule(size: int, batched: Any, w: Any, x: Any) -> Any:
        used.append(tuple(batched))
        return jnp.tanh(jnp.einsum("nf,fg->ng", x, w)), True

    w, x = jnp.ones((8, 8)) / 8, jnp.ones((4, 8))
    over_rows = jax.vmap(polyamp.autocast(product, "mixed_float16"), (None, 0))
    found = over_rows(w, x)
    assert used[0] == (False, True)
    assert "f16[" in str(jax.make_jaxpr(over_rows)(w, x))
    np.testing.assert_allclose(found, jnp.tanh(x @ w), rtol=1e-3)
    _, tangent = jax.jvp(lambda w: over_rows(w, x), (w,), (w,))
    _, exact = jax.jvp(lambda w: jnp.tanh(x @ w), (w,), (w,))
    np.testing.assert_allclose(tangent, exact, rtol=5e-3)


@pytest.mark.parametrize("compiled", [False, True])
def test_flags_and_counts_that_a_rule_hands_to_itself_stay_known(compiled: bool) -> None:
    @jax.custom_vjp
    def product(w: Any, x: Any) -> Any:
        return x @ w

    def forward(w: Any, x: Any) -> Any:
        return x @ w, (w, x, True, 3)

    def backward(kept: Any, cotangent: Any) -> Any:
        w, x, flag, count = kept
        assert type(flag) is bool
        if flag:
            return sum(x.T @ cotangent for _ in range(count)) / 3, cotangent @ w.T
        return None, None

    product.defvjp(forward, backward)
    w, x = jax.random.normal(jax.random.key(0), (8, 8)) / 3, jax.random.normal(jax.random.key(1), (4, 8))

    def loss(w: Any) -> Any:
        return jnp.square(product(w, x)).sum()

    grad = jax.grad(polyamp.autocast(loss, "mixed_float16"))
    np.testing.assert_allclose((jax.jit(grad) if compiled else grad)(w), jax.grad(loss)(w), rtol=1e-2, atol=1e-2)
