"""autocast of haiku's functions, and rules by haiku's module paths. Needs dm-haiku."""

from __future__ import annotations

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import pytest

import polyamp
from support.jax_scenarios import MODES, assert_close, assert_mixed, dots, normal
from support.jax_scenarios import quickly_compiled as quickly_compiled

X = normal(0, 4, 6, 16)


def model(x: jax.Array, train: bool = True) -> jax.Array:
    y = hk.LayerNorm(-1, True, True)(x)
    y = x + hk.MultiHeadAttention(2, 8, w_init=hk.initializers.VarianceScaling(1.0))(y, y, y)
    y = jax.nn.gelu(hk.Linear(32, name="up")(y))
    y = hk.dropout(hk.next_rng_key(), 0.1, y) if train else y
    y = hk.BatchNorm(True, True, 0.9)(hk.Linear(16, name="down")(y), is_training=train)
    return jnp.square(y - jnp.sin(x)).mean()


NET = hk.transform_with_state(model)
Made = tuple[Any, Any]  # parameters and state


@pytest.fixture(scope="module")
def made() -> Made:
    return jax.jit(NET.init)(jax.random.key(1), X)


@pytest.mark.parametrize(("policy", "inside"), MODES)
def test_apply(inside: bool, policy: str, made: Made) -> None:
    plain = jax.value_and_grad(NET.apply, has_aux=True)
    within = jax.value_and_grad(polyamp.autocast(NET.apply, policy), has_aux=True)
    mixed = within if inside else polyamp.autocast(plain, policy)
    arguments = *made, jax.random.key(2), X
    assert_mixed(mixed, plain, *arguments, policy=policy, outside=not inside)
    assert_close(jax.jit(mixed)(*arguments), jax.jit(plain)(*arguments), policy)


@pytest.mark.parametrize("pattern", ["up", "*attention", "*attention/linear"])
def test_rules_for_one_module(pattern: str, made: Made) -> None:
    """haiku's own policies are for classes."""
    params, state = made
    policy = polyamp.policy("mixed_bfloat16", rules={pattern: "full"})
    loss = lambda p: polyamp.autocast(NET.apply, policy)(p, state, jax.random.key(2), X)[0]  # noqa: E731
    count = {"up": 3, "*attention": 18, "*attention/linear": 3}[pattern]
    assert dots(jax.grad(loss), params).count({"float32"}) == count


def test_a_module_called_within_a_transform() -> None:
    """With parameters that exist: those that haiku made under autocast would be tracers."""

    def calling(wrap: Any) -> Any:
        return hk.transform(lambda x: wrap(lambda x: hk.Linear(16)(x))(x).mean())

    params = calling(lambda fn: fn).init(jax.random.key(0), X)
    mixed = calling(lambda fn: polyamp.autocast(fn, "mixed_bfloat16"))
    assert dots(lambda p: mixed.apply(p, None, X), params) == [{"bfloat16"}]
