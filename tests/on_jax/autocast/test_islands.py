"""An autocast to float32 inside another region is an island: everything in it runs in float32."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import polyamp
from support.jax_scenarios import quickly_compiled as quickly_compiled

W, X = jax.random.normal(jax.random.key(0), (8, 8)) / 3, jax.random.normal(jax.random.key(1), (4, 8))


def product(w: Any, x: Any) -> Any:
    return x @ w


def island(fn: Any) -> Any:
    return polyamp.autocast(fn, "float32", backend="jax")


def in_scan(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda h, _: (island(lambda h: h @ w)(h), None), x, None, length=2)[0]


@jax.custom_vjp
def own_rule(w: Any, x: Any) -> Any:
    return x @ w


own_rule.defvjp(lambda w, x: (x @ w, (w, x)), lambda kept, ct: (kept[1].T @ ct, ct @ kept[0].T))

ISLANDS = {
    "plain": island(product),
    "jitted outside": jax.jit(island(product)),
    "jitted inside": island(jax.jit(product)),
    "by a policy": polyamp.autocast(product, polyamp.policy("full")),
    "vmap": jax.vmap(island(lambda w, x: x @ w), (None, 0)),
    "checkpoint": jax.checkpoint(island(product)),
    "loop": in_scan,
    "loop inside": island(lambda w, x: jax.lax.fori_loop(0, 2, lambda _, h: h @ w, x)),
    "branch": island(lambda w, x: jax.lax.cond(x.sum() > 0, lambda: x @ w, lambda: x @ w * 2)),
    "custom rule": island(own_rule),
    "closure": lambda w, x: island(lambda: x @ w)(),
    "keyword": lambda w, x: island(lambda x, *, w: x @ w)(x, w=w),
}


@pytest.mark.parametrize("name", ISLANDS)
def test_an_inner_float32_is_an_island_forward_and_backward(name: str) -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.square(ISLANDS[name](w, x)).sum()

    outer = polyamp.autocast(loss, "mixed_float16")
    for program in (outer, jax.grad(outer), polyamp.autocast(jax.grad(loss), "mixed_float16")):
        assert "f16[" not in str(jax.make_jaxpr(program)(W, X))
    np.testing.assert_allclose(jax.grad(outer)(W, X), jax.grad(loss)(W, X), rtol=1e-5)


def test_what_is_around_an_island_is_lowered() -> None:
    def model(w: Any, x: Any) -> Any:
        return island(product)(w, jnp.tanh(x @ w)) @ w

    plan = polyamp.explain(model, W, X, policy="mixed_float16")
    assert [op.format for op in plan.operations if op.name == "matmul"] == ["float16", "float32", "float16"]
    (held,) = (op for op in plan.operations if op.reason == "autocast to float32")
    assert held.where.startswith("test_islands.py")
    text = str(jax.make_jaxpr(polyamp.autocast(model, "mixed_float16"))(W, X))
    assert text.count("dot_general") == 3
    assert text.count("preferred_element_type=float32") == 1


def test_an_island_holds_in_value_and_grad_and_rewrite() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.square(island(product)(w, x) @ w).mean()

    tx = polyamp.wrap_optimizer(optax.sgd(0.1), "mixed_float16")
    step = jax.make_jaxpr(polyamp.value_and_grad(loss, "mixed_float16"))(tx.init(W), W, X)
    assert str(step).count("preferred_element_type=float32") >= 2  # forward, and backward
    plan = polyamp.rewrite(loss, W, X, policy="mixed_float16").plan
    assert [op.format for op in plan.operations if op.name == "matmul"] == ["float32", "float16"]


def test_an_inner_value_and_grad_in_float32_is_an_island() -> None:
    state = polyamp.wrap_optimizer(optax.sgd(0.1), "float32").init(W)

    def outer(w: Any, x: Any) -> Any:
        return polyamp.value_and_grad(lambda w, x: jnp.square(x @ w).mean(), "float32")(state, w, x)[0]

    assert "f16[" not in str(jax.make_jaxpr(polyamp.autocast(outer, "mixed_float16"))(W, X))


def test_an_inner_autocast_without_a_policy_is_none() -> None:
    text = str(jax.make_jaxpr(polyamp.autocast(lambda w, x: polyamp.autocast(product)(w, x), "mixed_float16"))(W, X))
    assert "f16[" in text


def test_rules_of_the_outer_policy_find_their_scopes_around_an_island() -> None:
    def model(w: Any, x: Any) -> Any:
        with jax.named_scope("head"):
            return island(lambda: x @ w)() + x @ w

    policy = polyamp.policy("mixed_float16", rules={"head/matmul": "full"})
    plan = polyamp.explain(model, W, X, policy=policy)
    assert plan.unused_rules == ()
    assert {op.where.partition(" ")[0] for op in plan.operations} == {"head"}
