"""What autocast costs in accuracy and saves in memory: long scans, shared weights, masks, caches, residuals."""

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
    MODES,
    POLICIES,
    TOKENS,
    assert_close,
    attention,
    attention_loss,
    dots,
    formats,
    low,
    normal,
    only,
    relative_error,
    saved_bytes,
    trace,
)
from support.jax_scenarios import quickly_compiled as quickly_compiled

pytestmark = pytest.mark.slow

BF16 = "mixed_bfloat16"
TURNS = 1024
WIDTH = 32
ONE_PERCENT = 0.01


def gru_turn(p: Any, h: jax.Array, x: jax.Array) -> jax.Array:
    gates = jax.nn.sigmoid(x @ p["u"] + h @ p["w"])
    reset, update = jnp.split(gates, 2, axis=-1)
    new = jnp.tanh(x @ p["un"] + (reset * h) @ p["wn"])
    return update * h + (1 - update) * new


CELL = {
    "w": normal(1, WIDTH, 2 * WIDTH, scale=0.15),
    "u": normal(2, WIDTH, 2 * WIDTH, scale=0.15),
    "wn": normal(3, WIDTH, WIDTH, scale=0.12),
    "un": normal(4, WIDTH, WIDTH, scale=0.15),
}
SEQUENCE = normal(5, TURNS, 4, WIDTH)


def unrolled(turn: Callable[..., Any]) -> Callable[..., Any]:
    def loss(p: Any, xs: jax.Array) -> jax.Array:
        def body(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = turn(p, h, x)
            return h, h.sum(-1)

        return jnp.square(lax.scan(body, jnp.zeros((4, WIDTH)), xs)[1]).mean() * 16

    return loss


def test_weight_gradients_of_a_long_scan() -> None:
    """If casts are moved out of the scan, 1024 contributions are added up in 16 bits: 13 % and more in error."""
    loss = unrolled(gru_turn)
    plain = jax.grad(loss)
    wanted = jax.jit(plain)(CELL, SEQUENCE)
    for policy, inside in MODES:
        mixed = jax.grad(polyamp.autocast(loss, policy)) if inside else polyamp.autocast(plain, policy)
        assert set().union(*dots(mixed, CELL, SEQUENCE)) == {low(policy)}
        found = jax.jit(mixed)(CELL, SEQUENCE)
        errors = {name: relative_error(found[name], wanted[name]) for name in CELL}
        assert max(errors.values()) < ONE_PERCENT, (policy, errors)


def test_a_weight_that_is_used_often_adds_up_its_gradients_in_float32() -> None:
    w, x = normal(1, 16, 16, scale=0.1), normal(2, 4, 16)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(24):
            x = jnp.tanh(x @ w) + x * 0.5
        return x.mean()

    mixed = jax.grad(polyamp.autocast(loss, BF16))
    sums = [op for op in only(trace(mixed, w, x), "add_any") if op.outputs[0].shape == w.shape]
    assert len(sums) == 23
    assert {name for op in sums for name in op.floats} == {"float32"}
    assert_close(jax.jit(mixed)(w, x), jax.grad(loss)(w, x), BF16)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fill", [None, -jnp.inf], ids=str)
def test_masked_softmax_has_no_nan(fill: float | None, policy: str) -> None:
    """finfo(float32).min is -inf in both low formats, and -inf minus -inf is NaN where a row is masked as a whole."""
    mask = jnp.tril(jnp.ones((5, 5), bool))
    if fill != -jnp.inf:
        mask = mask.at[2].set(False)

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        return jnp.square(attention(weights, x, mask, fill)).mean()

    mixed = jax.jit(jax.value_and_grad(polyamp.autocast(loss, policy)))
    assert dots(mixed, BLOCK, TOKENS) == [{low(policy)}] * len(dots(jax.value_and_grad(loss), BLOCK, TOKENS))
    assert_close(mixed(BLOCK, TOKENS), jax.jit(jax.value_and_grad(loss))(BLOCK, TOKENS), policy)


@pytest.mark.parametrize("where", ["scalar", "array", "jit", "scan", "argument of where"])
def test_constants_that_float16_cannot_hold_force_float32(where: str) -> None:
    w = normal(0, 8, 8, scale=1e-3)
    tiny = jnp.full((8,), 1e-8)

    def shifted(y: jax.Array) -> jax.Array:
        guarded: dict[str, Callable[[], Any]] = {
            "scalar": lambda: y + 1e-8,
            "array": lambda: y + tiny,
            "jit": lambda: jax.jit(lambda z: z + jnp.broadcast_to(1e-8, z.shape))(y),
            "scan": lambda: lax.scan(lambda c, _: (c + 1e-8, None), y, None, length=1)[0],
            "argument of where": lambda: y + jnp.where(y > 1e30, y, 1e-8),
        }
        return guarded[where]()

    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        return 1.0 / shifted(jnp.maximum(x @ w, 0.0) * 0.0)

    out = polyamp.autocast(fn, "mixed_float16")(w, jnp.ones((2, 8)))
    np.testing.assert_allclose(out, np.full((2, 8), 1e8), rtol=1e-3)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_cache_keeps_its_own_type(kind: str) -> None:
    """dynamic_update_slice into a key-value cache: what is written takes the cache's type, not the reverse."""
    w = normal(0, 16, 16, scale=0.25)

    def decode(cache: jax.Array, x: jax.Array) -> Any:
        def turn(cache: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
            new = (x[at] @ w)[None].astype(cache.dtype)
            cache = lax.dynamic_update_slice(cache, new, (at, 0))
            return cache, jax.nn.softmax(cache.astype(jnp.float32) @ x[at])

        return lax.scan(turn, cache, jnp.arange(3))

    cache = jnp.full((4, 16), 1 / 3, kind)
    mixed = polyamp.autocast(decode, BF16)
    assert set().union(*dots(mixed, cache, TOKENS[0])) == {"bfloat16"}
    ours, theirs = jax.jit(mixed)(cache, TOKENS[0]), decode(cache, TOKENS[0])
    assert_close(ours, theirs, BF16)
    np.testing.assert_array_equal(ours[0][3], cache[3])


def stack_of(dtype: Any) -> tuple[Any, Any]:
    class Block(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            y = linen.LayerNorm(dtype=dtype)(x)
            x = x + linen.MultiHeadDotProductAttention(4, dtype=dtype, force_fp32_for_softmax=True)(y)
            y = linen.Dense(256, dtype=dtype)(linen.LayerNorm(dtype=dtype)(x))
            return x + linen.Dense(64, dtype=dtype)(linen.gelu(y))

    class Model(linen.Module):
        @linen.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = linen.Embed(100, 64, dtype=dtype)(tokens)
            for _ in range(2):
                x = Block()(x)
            return linen.Dense(100, dtype=dtype)(linen.LayerNorm(dtype=dtype)(x))

    model, tokens = Model(), jnp.arange(64).reshape(2, 32) % 100
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)

    def loss(params: Any) -> jax.Array:
        scores = model.apply(params, tokens).astype(jnp.float32)
        return -jnp.take_along_axis(jax.nn.log_softmax(scores), tokens[..., None], -1).mean()

    return loss, params


def test_residuals_of_a_transformer() -> None:
    """Against float32, and against flax's own dtype=bfloat16, which is the most that hand-written casts save."""
    plain, params = stack_of(None)
    by_hand, _ = stack_of(jnp.bfloat16)
    ours = saved_bytes(polyamp.autocast(plain, BF16), params)
    assert ours < 0.8 * saved_bytes(plain, params)
    assert ours <= 1.05 * saved_bytes(by_hand, params)


def test_residuals_of_attention_and_their_place_in_the_plan() -> None:
    mixed = polyamp.autocast(attention_loss, BF16)
    totals = polyamp.explain(attention_loss, BLOCK, TOKENS, policy=BF16).as_dict()["totals"]
    assert totals["bytes_saved"] == saved_bytes(mixed, BLOCK, TOKENS)
    assert totals["bytes_saved"] < saved_bytes(attention_loss, BLOCK, TOKENS)


SPREAD: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "a bias": lambda rows, p: rows + p,
    "a scale": lambda rows, p: rows * p,
    "a quotient": lambda rows, p: rows / (2 + p),
    "a scalar": lambda rows, p: rows * p[0],
    "a gate of 16 bits": lambda rows, p: rows * (p[None] @ jnp.eye(8)),
    "a broadcast of 16 bits": lambda rows, p: rows * jnp.broadcast_to((p[None] @ jnp.eye(8))[0], rows.shape),
}


@pytest.mark.parametrize("kind", SPREAD)
def test_gradients_of_what_is_spread_over_rows_are_summed_in_float32(kind: str) -> None:
    x, w = 1 + normal(0, 20_000, 8), jnp.eye(8) + normal(1, 8, 8, scale=0.1)

    def loss(p: jax.Array) -> jax.Array:
        return SPREAD[kind](x @ w, p).sum()  # beyond float16, and in bfloat16 stuck at 256 times its terms

    scale, mixed = normal(2, 8) / 8, jax.grad(polyamp.autocast(loss, BF16))
    assert formats(mixed, scale, of=("reduce_sum",)) == {"float32"}
    ours, theirs = mixed(scale), jax.grad(loss)(scale)
    np.testing.assert_allclose(ours, theirs, rtol=0.02, atol=0.01 * float(jnp.abs(theirs).max()))


def test_a_low_value_that_a_scan_holds_gets_its_gradients_added_up_in_float32() -> None:
    x, turns = normal(1, 16, 32), 1 + normal(2, TURNS, 4, 16, scale=0.3)

    def loss(w: jax.Array) -> jax.Array:
        memory = jnp.tanh(x @ w)
        return lax.scan(lambda total, turn: (total + (turn @ memory).sum() * 0.01, None), 0.0, turns)[0]

    w = normal(0, 32, 32, scale=0.2)
    ours, theirs = jax.grad(polyamp.autocast(loss, BF16))(w), jax.grad(loss)(w)
    assert relative_error(ours, theirs) < ONE_PERCENT


MANY = 4096
ZEROS = jnp.zeros(MANY, jnp.int32)

TAKEN = {
    "index": lambda h: h[ZEROS],
    "take": lambda h: jnp.take(h, ZEROS, axis=0),
    "take columns": lambda h: jnp.take(h.T, ZEROS, axis=1).T,
    "clip mode": lambda h: jnp.take(h, ZEROS, axis=0, mode="clip"),
    "fill mode": lambda h: h.at[ZEROS].get(mode="fill", fill_value=0),
    "take_along_axis": lambda h: jnp.take_along_axis(h, jnp.zeros((MANY, 8), int), axis=0),
    "repeat": lambda h: jnp.repeat(h[:1], MANY, axis=0),
    "repeat by lengths": lambda h: jnp.repeat(h, jnp.array([MANY, 0, 0, 0]), axis=0, total_repeat_length=MANY),
    "broadcast": lambda h: jnp.broadcast_to(h[0], (MANY, 8)),
    "tile": lambda h: jnp.tile(h[:1], (MANY, 1)),
    "vmap": lambda h: jax.vmap(lambda i: h[i])(ZEROS),
    "dynamic slices": lambda h: jax.vmap(lambda i: lax.dynamic_slice_in_dim(h, i, 1))(ZEROS)[:, 0],
    "one_hot": lambda h: jax.nn.one_hot(ZEROS, 4, dtype=h.dtype) @ h,
}


@pytest.mark.parametrize("name", TAKEN)
def test_the_gradient_of_what_is_taken_often_does_not_stop_growing(name: str) -> None:
    w, rows = jnp.ones((8, 8)) / 8, jnp.ones((4, 8))

    def loss(w: Any) -> Any:
        return TAKEN[name](rows @ w).sum()

    grad = jax.jit(jax.grad(polyamp.autocast(loss, BF16)))
    np.testing.assert_allclose(grad(w), jax.grad(loss)(w), rtol=ONE_PERCENT)
