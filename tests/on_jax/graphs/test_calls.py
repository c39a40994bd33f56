"""A function under ``jax.jit`` that a program calls often is rewritten once, and means what it meant."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyamp
from support.jax_scenarios import quickly_compiled as quickly_compiled

pytestmark = pytest.mark.slow

WIDTH = 16


def block(p: Any, x: Any) -> Any:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    h = (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p["g"] + p["b"]
    weights = jax.nn.softmax(jnp.einsum("btd,bsd->bts", h @ p["q"], h @ p["k"]) / 4.0, -1)
    x = x + jnp.einsum("bts,bsd->btd", weights, h) @ p["v"]
    return x + jax.nn.gelu(x @ p["q"]) @ p["k"]


def dense(p: Any, x: Any) -> Any:
    return jax.nn.gelu(x @ p["q"])


JITTED = {"block": jax.jit(block), "dense": jax.jit(dense)}


def params(index: int) -> Any:
    keys = iter(jax.random.split(jax.random.key(index), 3))
    made = {name: jax.random.normal(next(keys), (WIDTH, WIDTH)) / 4 for name in "qkv"}
    return made | {"g": jnp.ones(WIDTH), "b": jnp.zeros(WIDTH)}


X = jax.random.normal(jax.random.key(99), (2, 8, WIDTH))
TABLE = jax.random.normal(jax.random.key(98), (32, WIDTH))


def stack(layer: Any, start: str) -> Any:
    """Return a loss through a stack of layers that starts with data, an embedding, a projection or a norm."""

    def loss(trained: Any, x: Any) -> Any:
        table, layers = trained
        first = {
            "data": lambda: x,
            "embedding": lambda: table[jnp.zeros((2, 8), int)],
            "projection": lambda: x @ layers[0]["q"],
            "norm": lambda: x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True)),
        }
        h = first[start]()
        for own in layers:
            h = layer(own, h)
        return jnp.square(h).mean()

    return loss


def lines(fn: Any, *args: Any) -> int:
    return len(jax.jit(jax.grad(fn)).lower(*args).as_text().splitlines())


def flat(tree: Any) -> Any:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def distance(one: Any, other: Any) -> float:
    return float(np.linalg.norm(flat(one) - flat(other)) / np.linalg.norm(flat(other)))


@pytest.mark.parametrize("start", ["data", "embedding", "projection", "norm"])
@pytest.mark.parametrize("name", JITTED)
def test_24_calls_are_a_program_as_short_as_in_float32(name: str, start: str) -> None:
    loss, args = stack(JITTED[name], start), ((TABLE, [params(i) for i in range(24)]), X)
    limit = 1.3 if (name, start) == ("dense", "projection") else 1.2  # there the first call alone has 16-bit data
    assert lines(polyamp.autocast(loss, "mixed_bfloat16"), *args) < limit * lines(loss, *args)


def transformed(kind: str) -> Any:
    """Return a loss that calls a jitted function twice inside a transformation."""
    layer = JITTED["block"]

    def twice(p: Any, x: Any) -> Any:
        return layer(p, layer(p, x))

    def in_scan(p: Any, x: Any) -> Any:
        return jax.lax.scan(lambda h, _: (twice(p, h), None), x, None, length=2)[0]

    def closing_over(p: Any, x: Any) -> Any:
        inner = jax.jit(lambda h: jnp.tanh(h @ p["q"]) + x)
        return inner(inner(x))

    forms = {
        "vmap": lambda p, x: jax.vmap(twice, (None, 0))(p, x[:, None]),
        "inside vmap": lambda p, x: jax.vmap(lambda h: layer(p, layer(p, h[None])))(x),
        "scan": in_scan,
        "remat": lambda p, x: jax.checkpoint(twice)(p, x),
        "cond": lambda p, x: jax.lax.cond(x.sum() > 0, twice, lambda p, x: layer(p, x), p, x),
        "closure": closing_over,
        "nested": lambda p, x: jax.jit(twice)(p, jax.jit(twice)(p, x)),
        "formats": lambda p, x: layer(p, x) + layer(p, x @ p["q"]) + layer(p, jnp.exp(x)),
        "constants": lambda p, x: jnp.clip(x @ p["q"], -1e9, 1e9) + jnp.clip(x @ p["k"], -2.0, 2.0) + layer(p, x),
    }
    return lambda p, x: jnp.square(forms[kind](p, x)).mean()


@pytest.mark.parametrize(
    "kind", ["vmap", "inside vmap", "scan", "remat", "cond", "closure", "nested", "formats", "constants"]
)
def test_calls_inside_of_transformations_have_the_gradients_of_float32(kind: str) -> None:
    loss, p = transformed(kind), params(0)
    exact = jax.jit(jax.grad(loss))(p, X)
    policy, tolerance = "mixed_float16", 5e-3
    for fn in (jax.grad(polyamp.autocast(loss, policy)), polyamp.autocast(jax.grad(loss), policy)):
        found = jax.jit(fn)(p, X)
        assert jax.tree.map(lambda leaf: leaf.dtype, found) == jax.tree.map(lambda leaf: leaf.dtype, exact)
        assert distance(found, exact) < tolerance


def test_a_constant_beyond_the_format_is_guarded_in_a_call_too() -> None:
    masked = jax.jit(lambda x, mask, low: jnp.where(mask, x, low))

    def loss(w: Any, x: Any) -> Any:
        h = masked(x @ w, x > 0, -1e9)
        return jax.nn.softmax(masked(h @ w, x > 0, -1e9), -1).sum() + masked(x @ w, x > 0, -2.0).sum()

    found = polyamp.autocast(loss, "mixed_float16")(params(0)["q"], X[0])
    assert np.isfinite(found)
    assert np.isclose(found, loss(params(0)["q"], X[0]), rtol=1e-2)


def test_rules_by_scope_tell_calls_of_one_function_apart() -> None:
    layer = JITTED["dense"]

    def model(p: Any, x: Any) -> Any:
        with jax.named_scope("body"):
            x = layer(p, layer(p, x))
        with jax.named_scope("head"):
            return layer(p, layer(p, x))

    policy = polyamp.policy("mixed_float16", rules={"head/*": "full"})
    for _ in range(2):  # the second time the rewritten functions are known, and every rule still counts as matched
        text = str(jax.make_jaxpr(polyamp.autocast(model, policy))(params(0), X))
        assert text.count("preferred_element_type=float16") == 1  # printed once for both calls, as they share it
        assert "preferred_element_type=float32" in text
    formats = {
        op.where.partition(" ")[0].partition("/")[0]: op.format
        for op in polyamp.explain(model, params(0), X, policy=policy).operations
        if op.name == "matmul"
    }
    assert formats == {"body": "float16", "head": "float32"}


def test_a_float32_island_and_the_rest_are_told_apart() -> None:
    layer = JITTED["dense"]

    def model(p: Any, x: Any) -> Any:
        return layer(p, layer(p, x)) + polyamp.autocast(lambda h: layer(p, layer(p, h)), "float32")(x)

    text = str(jax.make_jaxpr(polyamp.autocast(model, "mixed_float16"))(params(0), X))
    assert "preferred_element_type=float16" in text
    assert "preferred_element_type=float32" in text
