"""Norms that a program writes out are float32 inside and 16 bits outside; so are loops in which nothing adds up."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import polyamp
from polyamp.backends.jax.unstable import loop_parts
from support.jax_scenarios import POLICIES, X, formats, low, normal, relative_error, residuals, saved_bytes
from support.jax_scenarios import quickly_compiled as quickly_compiled

pytestmark = pytest.mark.slow

BF16, F16 = "mixed_bfloat16", "mixed_float16"
W = normal(0, 8, 8, scale=0.3)
Model = Callable[[Any, Any], Any]


def by_hand(p: Any, h: Any) -> Any:
    mean = h.mean(-1, keepdims=True)
    return (h - mean) / jnp.sqrt(((h - mean) ** 2).mean(-1, keepdims=True) + 1e-6) * p["s"] + p["b"]


def root_mean_square(p: Any, h: Any) -> Any:
    return h * lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-6) * p["s"]


def standardized(p: Any, h: Any) -> Any:
    return jax.nn.standardize(h, axis=-1) * p["s"] + p["b"]


def of_flax(module: nn.Module, **options: Any) -> Model:
    def norm(p: Any, h: Any) -> Any:
        variables = {"params": {"scale": p["s"], "bias": p["b"]}}
        if isinstance(module, nn.RMSNorm):
            variables = {"params": {"scale": p["s"]}}
        if isinstance(module, nn.BatchNorm):
            variables["batch_stats"] = {"mean": jnp.zeros(8), "var": jnp.ones(8)}
        out = module.apply(variables, h, **options)
        return out[0] if options else out

    return norm


def of_equinox(layer: Any) -> Model:
    def norm(p: Any, h: Any) -> Any:
        own = eqx.tree_at(lambda one: one.weight, layer, p["s"])
        return jax.vmap(own)(h)

    return norm


def of_haiku(p: Any, h: Any) -> Any:
    return hk.without_apply_rng(hk.transform(lambda x: hk.LayerNorm(-1, True, True)(x))).apply(
        {"layer_norm": {"scale": p["s"], "offset": p["b"]}}, h
    )


NORMS: dict[str, Model] = {
    "by hand": by_hand,
    "root mean square": root_mean_square,
    "standardize": standardized,
    "flax LayerNorm": of_flax(nn.LayerNorm()),
    "flax LayerNorm, two passes": of_flax(nn.LayerNorm(use_fast_variance=False)),
    "flax RMSNorm": of_flax(nn.RMSNorm()),
    "flax GroupNorm": of_flax(nn.GroupNorm(num_groups=2)),
    "flax BatchNorm": of_flax(nn.BatchNorm(use_running_average=False), mutable=["batch_stats"]),
    "flax BatchNorm, inference": of_flax(nn.BatchNorm(use_running_average=True)),
    "equinox LayerNorm": of_equinox(eqx.nn.LayerNorm(8)),
    "equinox RMSNorm": of_equinox(eqx.nn.RMSNorm(8)),
    "haiku LayerNorm": of_haiku,
}
PARAMETERS = {"w": W, "s": jnp.linspace(0.5, 1.5, 8), "b": jnp.linspace(-1.0, 1.0, 8)}


@pytest.mark.parametrize(
    ("name", "policy"), [*((name, BF16) for name in NORMS), *((name, F16) for name in ("by hand", "flax BatchNorm"))]
)
def test_what_follows_a_norm_is_low_and_what_is_inside_is_not(name: str, policy: str) -> None:
    def model(p: Any, x: Any) -> Any:
        h = NORMS[name](p, x @ p["w"])
        return jnp.maximum(h, h * 0.01) @ p["w"]  # leaky, in operations that nothing else here uses

    mixed = polyamp.autocast(model, policy)
    of_norm = ("square", "rsqrt", "sqrt", "reduce_sum")
    assert formats(mixed, PARAMETERS, X, of=of_norm) == {"float32"}
    plan = polyamp.explain(model, PARAMETERS, X, policy=policy)
    assert {op.format for op in plan.operations if op.native == "max" and op.reason != "table"} >= {low(policy)}
    error = relative_error(jax.jit(mixed)(PARAMETERS, X), jax.jit(model)(PARAMETERS, X))
    assert error < {BF16: 2e-2, F16: 2e-3}[policy]


@pytest.mark.parametrize("name", NORMS)
def test_the_gradient_of_a_norm_is_right(name: str) -> None:
    def loss(p: Any, x: Any) -> Any:
        return (jnp.sin(NORMS[name](p, x @ p["w"])) @ p["w"]).mean()

    found, wanted = (jax.jit(jax.grad(fn))(PARAMETERS, X) for fn in (polyamp.autocast(loss, BF16), loss))
    assert relative_error(found, wanted) < 2e-2


def test_a_rule_of_class_inner_rounds_what_it_computed_wide() -> None:
    policy = polyamp.policy(F16, rules={"exp": "inner", "add": "inner"})
    mixed = polyamp.autocast(lambda w, x: jnp.exp(x @ w) + 1.0, policy)
    rows = polyamp.explain(lambda w, x: jnp.exp(x @ w) + 1.0, W, X, policy=policy).operations
    assert [op.op_class for op in rows] == ["lower", "inner", "inner"]
    assert formats(mixed, W, X, of=("exp", "add")) == {"float32"}
    assert relative_error(mixed(W, X), jnp.exp(X @ W) + 1.0) < 2e-3


def batch_normed(p: Any, x: Any) -> Any:
    for _ in range(3):
        x = nn.relu(NORMS["flax BatchNorm"](p, x @ p["w"]))
    return x.sum()


def test_of_norms_the_backward_pass_keeps_16_bits() -> None:
    x = normal(3, 512, 8)
    mixed = polyamp.autocast(batch_normed, BF16)
    wide = [leaf for leaf in residuals(lambda p: mixed(p, x), PARAMETERS) if str(leaf.dtype) == "float32"]
    assert max(leaf.size for leaf in wide) <= 64
    assert saved_bytes(lambda p: mixed(p, x), PARAMETERS) < 0.45 * saved_bytes(lambda p: batch_normed(p, x), PARAMETERS)


def test_of_a_softmax_the_backward_pass_keeps_16_bits() -> None:
    def attend(p: Any, x: Any) -> Any:
        scores = jnp.einsum("btd,bsd->bts", x @ p, x @ p)
        scores = jnp.where(jnp.tril(jnp.ones((64, 64), bool)), scores, jnp.finfo(jnp.float32).min)
        return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), x @ p).sum()

    x = normal(4, 2, 64, 8)
    kept = residuals(lambda p: polyamp.autocast(attend, BF16)(p, x), W)
    assert not [leaf for leaf in kept if str(leaf.dtype) == "float32" and leaf.shape[-2:] == (64, 64)]


# ------------------------------------------------------------------------------------------------------------- loops

WIDTH = 16
CELL = {
    "wx": normal(5, 8, 4 * WIDTH, scale=0.25),
    "wh": normal(6, WIDTH, 4 * WIDTH, scale=0.15),
    "b": normal(7, 4 * WIDTH, scale=0.1),
}


def lstm_turn(p: Any, carry: Any, x: Any) -> Any:
    c, h = carry
    i, f, g, o = jnp.split(x @ p["wx"] + h @ p["wh"] + p["b"], 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (c, h), h


def lstm(p: Any, xs: Any) -> Any:
    zeros = jnp.zeros((xs.shape[1], WIDTH))
    return lax.scan(lambda carry, x: lstm_turn(p, carry, x), (zeros, zeros), xs)


def carried(fn: Callable[..., Any], *args: Any) -> list[str]:
    """Return the floating-point dtypes that the loop of a program carries."""
    (loop,) = [one for one in jax.make_jaxpr(fn)(*args).eqns if one.primitive.name in ("scan", "while")]
    outputs = loop.outvars[: loop_parts(loop.params)[1]] if loop.primitive.name == "scan" else loop.outvars
    return [str(var.aval.dtype) for var in outputs if jnp.issubdtype(var.aval.dtype, jnp.floating)]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cell_state_is_float32_and_a_hidden_state_is_not(policy: str) -> None:
    mixed = polyamp.autocast(lstm, policy)
    assert carried(mixed, CELL, normal(8, 5, 4, 8)) == ["float32", low(policy)]
    (_, h), hs = mixed(CELL, normal(8, 5, 4, 8))
    assert {h.dtype, hs.dtype} == {jnp.dtype("float32")}


CARRIES: dict[str, tuple[Callable[[Any, Any], Any], bool]] = {
    "recurrence": (lambda w, x: lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=3)[0], True),
    "sum": (lambda w, x: lax.scan(lambda s, _: (s + jnp.tanh(x @ w), None), x, None, length=3)[0], False),
    "residual": (lambda w, x: lax.fori_loop(0, 3, lambda _, h: h + h @ w, x), False),
    "decay": (lambda w, x: lax.scan(lambda s, _: (0.9 * s, s @ w), x, None, length=3)[0], False),
    "while": (lambda w, x: lax.while_loop(lambda c: c[0].sum() < 1e6, lambda c: (c[0] @ w, c[1] + 1), (x, 0))[0], True),
    "exchanged": (
        lambda w, x: lax.scan(lambda c, _: ((c[1], jnp.tanh(c[0] @ w)), None), (x, x), None, length=3)[0][0],
        False,
    ),
    "too large a start": (
        lambda w, x: lax.scan(lambda h, _: (jnp.tanh(h @ w), None), jnp.full((6, 8), 1e30), None, length=3)[0],
        False,
    ),
    "normalised": (
        lambda w, x: lax.scan(lambda h, _: (by_hand(PARAMETERS, h @ w), None), x, None, length=3)[0],
        True,
    ),
    "nested": (
        lambda w, x: lax.scan(
            lambda h, _: (lax.fori_loop(0, 2, lambda _, g: jnp.tanh(g @ w), h), None), x, None, length=3
        )[0],
        True,
    ),
}


@pytest.mark.parametrize("name", CARRIES)
def test_what_adds_up_is_float32_and_what_does_not_is_not(name: str) -> None:
    fn, is_low = CARRIES[name]
    assert carried(polyamp.autocast(fn, F16), W, X)[0] == ("float16" if is_low else "float32")
    if name != "while":
        assert relative_error(polyamp.autocast(fn, BF16)(W, X), fn(W, X)) < 3e-2


def test_a_loop_keeps_no_more_than_one_that_is_cast_by_hand() -> None:
    def states(p: Any, xs: Any) -> Any:
        return jnp.square(lstm(p, xs)[1]).mean()

    def by_hand(p: Any, xs: Any) -> Any:
        low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (p, xs))
        zeros = jnp.zeros((4, WIDTH), jnp.bfloat16)
        turn = lambda carry, x: lstm_turn(low[0], carry, x)  # noqa: E731
        return jnp.square(lax.scan(turn, (zeros, zeros), low[1])[1].astype(jnp.float32)).mean()

    xs = normal(9, 64, 4, 8)
    kept = saved_bytes(lambda p: polyamp.autocast(states, BF16)(p, xs), CELL)
    assert kept <= saved_bytes(lambda p: by_hand(p, xs), CELL)
