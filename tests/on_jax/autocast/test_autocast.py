"""autocast of JAX functions: every transformation in either order, every kind of argument, effects, ahead of time."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import polyamp
import polyamp.backends.jax as amp
from support.jax_scenarios import (
    BLOCK,
    MLP,
    MODES,
    TOKENS,
    TOLERANCE,
    Reference,
    X,
    assert_close,
    attention_loss,
    dots,
    mlp,
    normal,
    relative_error,
)
from support.jax_scenarios import quickly_compiled as quickly_compiled

BF16 = "mixed_bfloat16"
W = normal(0, 8, 8, scale=0.3)
# The loss rises in every element of this direction. Along ones, its derivative is a small difference of large terms, so
# that its relative error depends on the order in which a CPU adds up.
DIRECTION = jax.tree.map(jnp.sign, jax.grad(mlp)(MLP, X))


def hessian_times_direction(loss: Callable[..., Any]) -> Callable[..., Any]:
    return lambda p, x: jax.jvp(lambda q: jax.grad(loss)(q, x), (p,), (DIRECTION,))[1]


TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "none": lambda f: f,
    "jit": jax.jit,
    "nested jit": lambda f: jax.jit(lambda p, x: jax.jit(jax.jit(f))(p, x) * 2),
    "grad": jax.grad,
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "grad of jit": lambda f: jax.grad(jax.jit(f)),
    "value_and_grad": jax.value_and_grad,
    "grad of both": lambda f: jax.grad(f, argnums=(0, 1)),
    "vmap": lambda f: lambda p, x: jax.vmap(lambda one: f(p, one[None]))(x),
    "vmap of grad": lambda f: lambda p, x: jax.vmap(lambda one: jax.grad(f)(p, one[None]))(x),
    "jvp": lambda f: lambda p, x: jax.jvp(lambda q: f(q, x), (p,), (DIRECTION,)),
    "hvp": hessian_times_direction,
    "jacrev": lambda f: jax.jacrev(lambda p, x: f(p, x)),
    "jacfwd": lambda f: lambda p, x: jax.jacfwd(lambda b: f({**p, "b1": b}, x))(p["b1"]),
    "linearize": lambda f: lambda p, x: jax.linearize(lambda q: f(q, x), p)[1](DIRECTION),
    "vjp": lambda f: lambda p, x: jax.vjp(f, p, x)[1](jnp.float32(2)),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transformations_in_either_order(name: str) -> None:
    transform = TRANSFORMS[name]
    plain = Reference(transform(mlp), MLP, X)
    for policy, inside in MODES:
        mixed = transform(polyamp.autocast(mlp, policy)) if inside else polyamp.autocast(plain.fn, policy)
        plain.check(mixed, policy, outside=not inside)


def test_uncompiled_is_as_compiled() -> None:
    mixed = polyamp.autocast(jax.grad(attention_loss), BF16)
    assert relative_error(mixed(BLOCK, TOKENS), jax.jit(mixed)(BLOCK, TOKENS)) < TOLERANCE[BF16]


@pytest.mark.slow
@pytest.mark.parametrize(
    "context",
    [
        jax.checking_leaks,
        lambda: jax.numpy_dtype_promotion("strict"),
        lambda: jax.numpy_rank_promotion("raise"),
        jax.disable_jit,
        lambda: jax.debug_nans(True),
        lambda: jax.enable_custom_prng(True),
        lambda: jax.named_scope("outer"),
    ],
    ids=["checking_leaks", "strict promotion", "rank promotion", "disable_jit", "debug_nans", "custom_prng", "scope"],
)
def test_under_the_settings_of_jax(context: Callable[[], Any]) -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.square(jax.nn.softmax(x @ w) @ w).mean()

    with context():
        grads = jax.grad(polyamp.autocast(loss, BF16))(W, X)
    assert_close(grads, jax.grad(loss)(W, X), BF16)


def test_the_ways_to_write_it_agree() -> None:
    @polyamp.autocast(BF16)
    def decorated(p: Any, x: Any) -> Any:
        return mlp(p, x)

    ways = {
        "function": polyamp.autocast(mlp, BF16),
        "decorator": decorated,
        "backend": amp.autocast(mlp, BF16),
        "keyword": polyamp.autocast(mlp, policy=polyamp.policy(BF16)),
        "rewrite": polyamp.rewrite(mlp, MLP, X, policy=BF16),
        "partial": partial(polyamp.autocast(partial(mlp, MLP), BF16)),
        "jitted": polyamp.autocast(jax.jit(mlp), BF16),
    }
    results = [way(X) if name == "partial" else way(MLP, X) for name, way in ways.items()]
    assert len({float(result) for result in results}) == 1
    assert decorated.__name__ == "decorated"
    assert results[0] != mlp(MLP, X)


def test_a_rewritten_function_that_is_gone_keeps_nothing() -> None:
    def jaxprs() -> int:
        gc.collect()
        return sum(type(one).__name__ == "Jaxpr" for one in gc.get_objects())

    counts = []
    for _ in range(3):
        polyamp.rewrite(lambda p, x: mlp(p, x), MLP, X, policy=BF16)(MLP, X)
        counts.append(jaxprs())
    assert counts[1] == counts[2]


def test_the_current_policy_is_that_of_the_call() -> None:
    mixed = polyamp.autocast(mlp)
    with polyamp.policy(BF16):
        assert dots(mixed, MLP, X) == [{"bfloat16"}] * 2
    with polyamp.policy("mixed_float16"):
        assert dots(mixed, MLP, X) == [{"float16"}] * 2
    bound = polyamp.autocast(mlp, "mixed_float16")
    with polyamp.policy(BF16):
        assert dots(bound, MLP, X) == [{"float16"}] * 2


def test_nested_autocasts_take_the_inner_policy_inside() -> None:
    inner = polyamp.autocast(lambda x: x @ W, "mixed_float16")
    mixed = polyamp.autocast(lambda x: inner(x) @ W, BF16)
    assert dots(mixed, X) == [{"float16"}, {"bfloat16"}]


def test_methods_and_objects_that_are_no_trees() -> None:
    class Net:
        @polyamp.autocast(BF16)
        def forward(self, x: Any) -> Any:
            return x @ W

    class Callable_:
        def __call__(self, x: Any) -> Any:
            return x @ W

    assert dots(Net().forward, X) == [{"bfloat16"}]
    assert dots(polyamp.autocast(Callable_(), BF16), X) == [{"bfloat16"}]


def test_weak_types_of_outputs_are_kept() -> None:
    def fn(x: Any, scale: Any) -> Any:
        return (x @ W).sum() + scale, scale * 2, jnp.asarray(1.5)

    plain = jax.eval_shape(fn, X, jax.ShapeDtypeStruct((), jnp.float32, weak_type=True))
    mixed = jax.eval_shape(polyamp.autocast(fn, BF16), X, jax.ShapeDtypeStruct((), jnp.float32, weak_type=True))
    assert [leaf.weak_type for leaf in mixed] == [leaf.weak_type for leaf in plain] == [False, True, True]


def test_abstract_arguments_are_enough_for_a_plan() -> None:
    """jmp's casts leave ShapeDtypeStructs in float32."""
    specs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (MLP, X))
    plan = polyamp.explain(mlp, *specs, policy=BF16)
    assert [op["format"] for op in plan.as_dict()["operations"] if op["name"] == "matmul"] == ["bfloat16"] * 2
    assert polyamp.rewrite(mlp, *specs, policy=BF16).plan.as_dict() == plan.as_dict()
