"""A policy's rules in JAX, by operation, scope and module path; and what the user asked for operation by operation."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax import lax

import polyamp
from support.jax_scenarios import (
    BLOCK,
    MLP,
    TOKENS,
    X,
    assert_close,
    attention_loss,
    dots,
    formats,
    mlp,
    normal,
    only,
    trace,
)
from support.jax_scenarios import quickly_compiled as quickly_compiled

BF16 = "mixed_bfloat16"
W = normal(0, 8, 8, scale=0.3)
LOW, FULL = {"bfloat16"}, {"float32"}


def ruled(fn: Callable[..., Any], **rules: str) -> Callable[..., Any]:
    named = {name.replace("__", "/"): op_class for name, op_class in rules.items()}
    return polyamp.autocast(fn, polyamp.policy(BF16, rules=named))


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_rules_by_operation(inside: bool) -> None:
    def grads(**rules: str) -> Callable[..., Any]:
        return jax.grad(ruled(attention_loss, **rules)) if inside else ruled(jax.grad(attention_loss), **rules)

    assert formats(grads(exp="lower"), BLOCK, TOKENS, of=("exp",)) == LOW
    with pytest.warns(polyamp.PolyampWarning, match="changed nothing"):
        assert set().union(*dots(grads(matmul="full"), BLOCK, TOKENS)) == FULL


def in_a_scope(p: Any, x: jax.Array) -> jax.Array:
    y = jnp.tanh(x @ p["w1"] + p["b1"])
    with jax.named_scope("head"):
        scores = y @ p["w2"]
    return -jax.nn.log_softmax(scores)[:, 0].mean()


WRAPPINGS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "remat with policy": lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable),
    "vmap": lambda f: lambda p, x: jax.vmap(f, (None, 0))(p, x[:, None]).mean(),
    "scan": lambda f: lambda p, x: lax.scan(lambda c, row: (c + f(p, row), None), 0.0, x[:, None])[0],
    "cond": lambda f: lambda p, x: lax.cond(x[0, 0] > -9, f, lambda p, x: x.mean(), p, x),
    "scope": lambda f: lambda p, x: jax.named_scope("outer")(f)(p, x),
}


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_named_scope_holds_forward_and_backward(wrapping: str, inside: bool) -> None:
    program = WRAPPINGS[wrapping](in_a_scope)
    grads = jax.grad(ruled(program, head="full")) if inside else ruled(jax.grad(program), head="full")
    count = len(dots(jax.grad(program), MLP, X))
    assert dots(grads, MLP, X, within="head") == [FULL] * len(dots(jax.grad(program), MLP, X, within="head"))
    kinds = dots(grads, MLP, X)
    assert (len(kinds), kinds.count(LOW), kinds.count(FULL) >= 3) == (count, count - kinds.count(FULL), True)
    assert kinds.count(LOW) >= 2
    assert_close(jax.jit(grads)(MLP, X), jax.jit(jax.grad(program))(MLP, X), BF16)


def test_a_scope_around_the_derivative_and_inside_a_custom_rule() -> None:
    @jax.custom_vjp
    def product(w: jax.Array, x: jax.Array) -> jax.Array:
        return x @ w

    def forward(w: jax.Array, x: jax.Array) -> Any:
        with jax.named_scope("weights"):
            return jnp.matmul(x, w), (w, x)

    def backward(kept: Any, ct: jax.Array) -> Any:
        with jax.named_scope("weights"):
            dw = kept[1].T @ ct
        return dw, ct @ kept[0].T

    product.defvjp(forward, backward)
    grads = jax.grad(ruled(lambda w, x: jnp.square(product(w, x) @ w).mean(), weights="full"), argnums=(0, 1))
    assert dots(grads, W, X, within="weights") == [FULL] * 2
    assert dots(grads, W, X).count(LOW) == len(dots(grads, W, X)) - 2


def test_path_rules_do_not_touch_what_is_never_touched() -> None:
    """Casts, random bits and integers in a region stay as they are, whatever its class."""

    def fn(key: jax.Array, x: jax.Array) -> Any:
        with jax.named_scope("region"):
            bits = jax.random.bits(key, (8,))
            asked = (x @ W).astype(jnp.float16)
            moved = bits, asked, jnp.arange(8) * 2, lax.bitcast_convert_type(x, jnp.int32)
        return *moved, x @ W

    for op_class in ("full", "lower"):
        ours, theirs = ruled(fn, region=op_class)(jax.random.key(0), X), fn(jax.random.key(0), X)
        assert [leaf.dtype for leaf in ours] == [leaf.dtype for leaf in theirs]
        for index in (0, 2, 3):
            np.testing.assert_array_equal(ours[index], theirs[index])


class Encoder(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = x + linen.Dense(8)(jnp.tanh(linen.Dense(16)(x)))
        return x


class Model(linen.Module):
    def setup(self) -> None:
        self.encoder = Encoder()
        self.decoder = Encoder()

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.square(self.decoder(self.encoder(x))).mean()


@functools.cache
def encoder_and_decoder() -> tuple[Callable[..., Any], Any, Any]:
    """Return a loss, its parameters and their gradients."""
    model = Model()
    params = jax.jit(model.init)(jax.random.key(0), X)
    loss = lambda params: model.apply(params, X)  # noqa: E731
    return loss, params, jax.jit(jax.grad(loss))(params)


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize(
    ("pattern", "kept"),
    [("decoder", 12), ("decoder/Dense_1", 3), ("Encoder_*", 0), ("Model/decoder", 12), ("encoder.Dense_0", 3)],
)
def test_rules_by_module_path(pattern: str, kept: int, inside: bool) -> None:
    """One instance of a class at a time; haiku's policies are for classes only."""
    loss, params, plain = encoder_and_decoder()
    policy = polyamp.policy(BF16, rules={pattern: "full"} if kept else {"decoder": "lower"})
    grads = jax.grad(polyamp.autocast(loss, policy)) if inside else polyamp.autocast(jax.grad(loss), policy)
    assert dots(grads, params).count(FULL) == kept
    assert_close(jax.jit(grads)(params), plain, BF16)


@pytest.mark.parametrize("rule", ["soft_max", "decoder/norm", "Head"])
def test_a_rule_that_matches_nothing_is_reported_once(rule: str) -> None:
    mixed = polyamp.autocast(mlp, polyamp.policy(BF16, rules={rule: "full", "matmul": "lower"}))
    with pytest.warns(polyamp.PolyampWarning, match=rule) as said:
        mixed(MLP, X)
    assert len(said) == 1
    mixed(MLP, X)
    plan = polyamp.explain(mlp, MLP, X, policy=polyamp.policy(BF16, rules={rule: "full", "matmul": "lower"}))
    assert plan.as_dict()["unused_rules"] == [rule]
    assert rule in str(plan)


WISHES = ["high", "highest", lax.Precision.HIGHEST, ("highest", "default")]


@pytest.mark.parametrize("precision", [*WISHES, None, "default", lax.Precision.DEFAULT])
def test_precision_that_was_asked_for(precision: Any) -> None:
    mixed = polyamp.autocast(lambda x: jnp.matmul(x, W, precision=precision) @ W, BF16)
    assert dots(mixed, X) == [FULL if precision in WISHES else LOW, LOW]


def test_precision_from_the_context() -> None:
    def fn(x: jax.Array) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            y = x @ W
        return y @ W

    assert dots(polyamp.autocast(fn, BF16), X) == [FULL, LOW]
    grads = jax.grad(polyamp.autocast(lambda w: jnp.matmul(X, w, precision="highest").sum(), polyamp.policy(BF16)))
    with pytest.warns(polyamp.PolyampWarning, match="explain"):
        assert dots(grads, W) == [FULL] * 2


@pytest.mark.parametrize(
    ("preferred", "expected"),
    [(None, "bfloat16"), (jnp.float32, "bfloat16"), (jnp.bfloat16, None), (jnp.float16, None)],
)
def test_preferred_element_types(preferred: Any, expected: str | None) -> None:
    """float32 is what a float32 product has anyway; with another type the product stays as written."""

    def fn(x: jax.Array) -> Any:
        return jnp.matmul(x, W, preferred_element_type=preferred), x @ W

    wished, other = only(trace(polyamp.autocast(fn, BF16), X), "dot_general")
    assert other.floats == LOW
    if expected:
        assert wished.floats == {expected}
    else:
        assert {aval.dtype.name for aval in wished.inputs} == FULL
        assert wished.outputs[0].dtype == preferred
    assert polyamp.autocast(fn, BF16)(X)[0].dtype == fn(X)[0].dtype


@pytest.mark.parametrize("asked", ["float16", "bfloat16", "int32"])
def test_casts_that_the_user_wrote(asked: str) -> None:
    """The types that the user's Python code sees are those that the program has."""

    def fn(x: jax.Array) -> jax.Array:
        y = (x @ W).astype(asked)
        assert y.dtype == asked
        return jnp.cos(y.astype(jnp.float32)) if asked == "int32" else jnp.tanh(y)

    mixed = polyamp.autocast(fn, "mixed_bfloat16")
    assert mixed(X).dtype == fn(X).dtype
    if asked != "int32":
        assert formats(mixed, X, of=("tanh",)) == {asked}


def test_a_cast_of_a_user_16_bit_value_to_float32_makes_it_float32() -> None:
    def fn(x: jax.Array) -> jax.Array:
        y = (x @ W).astype(jnp.bfloat16).astype(jnp.float32)
        return y * 2.0

    assert formats(polyamp.autocast(fn, BF16), X, of=("mul",)) == FULL
