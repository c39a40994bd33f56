"""autocast of JAX's control flow and mapped axes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import polyamp
from support.jax_scenarios import MODES, Reference, assert_close, dots, normal, residuals
from support.jax_scenarios import quickly_compiled as quickly_compiled

pytestmark = pytest.mark.slow

BF16 = "mixed_bfloat16"
W = normal(0, 8, 8, scale=0.3)
X = normal(1, 6, 8)
POLICY = jax.checkpoint_policies


def layer(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def named_layer(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sin(checkpoint_name(x @ w, "product")) @ w


def loss(y: jax.Array) -> jax.Array:
    return jnp.square(y).mean()


def fori(w: jax.Array, x: jax.Array) -> jax.Array:
    return loss(lax.fori_loop(0, 3, lambda _, y: layer(w, y), x))


def nested_scans(w: jax.Array, x: jax.Array) -> jax.Array:
    def outer(y: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        y, sums = lax.scan(lambda z, _: (layer(w, z), z.sum()), y, None, length=2)
        return y + 1, sums

    y, sums = lax.scan(outer, x, None, length=3)
    return loss(y) + loss(sums)


def scan_of_layers(w: jax.Array, x: jax.Array) -> jax.Array:
    stacked = jnp.stack([w, w * 0.5, w.T])
    return loss(lax.scan(lambda y, own: (layer(own, y), None), x, stacked)[0])


def scan_of_remat(w: jax.Array, x: jax.Array) -> jax.Array:
    body = jax.checkpoint(lambda y, _: (layer(w, y), None), policy=POLICY.dots_saveable, prevent_cse=False)
    return loss(lax.scan(body, x, None, length=3)[0])


def scan_with_integers(w: jax.Array, x: jax.Array) -> jax.Array:
    def body(carry: Any, step: jax.Array) -> tuple[Any, Any]:
        y, key, count = carry
        key, own = jax.random.split(key)
        keep = jax.random.bernoulli(own, 0.8, y.shape)
        return (jnp.where(keep, layer(w, y), 0.0), key, count + step), (y[0], count)

    (y, _, count), (rows, counts) = lax.scan(body, (x, jax.random.key(0), 0), jnp.arange(4), reverse=True, unroll=2)
    return loss(y) + loss(rows) + (count + counts.sum()) * 1e-3


def cond_in_scan(w: jax.Array, x: jax.Array) -> jax.Array:
    def body(y: jax.Array, step: jax.Array) -> tuple[jax.Array, None]:
        return lax.cond(step % 2 == 0, lambda z: layer(w, z), lambda z: z * 0.5, y), None

    return loss(lax.scan(body, x, jnp.arange(4))[0])


def branches(w: jax.Array, x: jax.Array) -> jax.Array:
    options = [lambda y: y @ w, lambda y: jnp.exp(-jnp.square(y)), lambda y: (y @ w) @ w]
    return loss(sum(lax.switch(index, options, x) for index in (jnp.int32(0), jnp.int32(1), jnp.int32(2))))


def cond_with_structures(w: jax.Array, x: jax.Array) -> jax.Array:
    out = lax.cond(x[0, 0] > -9, lambda y: {"y": y @ w, "n": 1}, lambda y: {"y": y, "n": 2}, x)
    return loss(out["y"]) * out["n"]


def remat(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return lambda w, x: loss(jax.checkpoint(f, **options)(w, jax.checkpoint(f, **options)(w, x)))


def reduced(w: jax.Array, x: jax.Array) -> jax.Array:
    y = x @ w
    best = lax.reduce(y, -jnp.inf, lax.max, (0,))
    windows = lax.reduce_window(y[None], -jnp.inf, lax.max, (1, 2, 2), (1, 2, 2), "VALID")
    sums = lax.reduce_window(y[None], 0.0, lax.add, (1, 2, 2), (1, 1, 1), "SAME")
    return loss(best) + loss(windows) + loss(sums @ w)


def scattered(w: jax.Array, x: jax.Array) -> jax.Array:
    rows = jnp.array([0, 2, 2])
    y = (x @ w).at[rows].add((x @ w)[:3]).at[1].set(3.0).at[:, 0].multiply(2.0)
    return loss(y @ w) + loss(jnp.take(y, rows, axis=0))


def sorted_(w: jax.Array, x: jax.Array) -> jax.Array:
    y = x @ w
    values, where = lax.top_k(y, 3)
    return (
        loss(jnp.sort(y, axis=0)) + loss(values) + loss(jnp.cumsum(y, axis=1)) + loss(jnp.take_along_axis(y, where, 1))
    )


PROGRAMS: dict[str, Callable[..., Any]] = {
    "fori": fori,
    "nested scans": nested_scans,
    "scan of layers": scan_of_layers,
    "scan of remat": scan_of_remat,
    "scan with integers": scan_with_integers,
    "cond in scan": cond_in_scan,
    "switch": branches,
    "cond with structures": cond_with_structures,
    "remat": remat(layer),
    "remat dots_saveable": remat(layer, policy=POLICY.dots_saveable),
    "remat nothing_saveable": remat(named_layer, policy=POLICY.nothing_saveable),
    "remat names": remat(named_layer, policy=POLICY.save_only_these_names("product")),
    "remat without cse": remat(layer, prevent_cse=False),
    "reductions": reduced,
    "scatter": scattered,
    "sort": sorted_,
}


BOTH = ("nested scans", "cond in scan", "remat names")  # of the others, one order of grad and autocast each


@pytest.mark.parametrize(
    ("name", "policy", "inside"),
    [(name, *mode) for place, name in enumerate(PROGRAMS) for mode in (MODES if name in BOTH else [MODES[place % 2]])],
)
def test_control_flow_and_its_gradient(name: str, inside: bool, policy: str) -> None:
    plain = Reference(jax.value_and_grad(PROGRAMS[name], argnums=(0, 1)), W, X)
    inner = jax.value_and_grad(polyamp.autocast(PROGRAMS[name], policy), argnums=(0, 1))
    plain.check(inner if inside else polyamp.autocast(plain.fn, policy), policy, outside=not inside, factor=1.5)


@pytest.mark.parametrize("name", ["scan of layers", "cond in scan", "remat names", "fori"])
def test_control_flow_under_vmap(name: str) -> None:
    program = PROGRAMS[name]
    batch = jnp.stack([X, X * 0.5])
    mixed = jax.vmap(jax.grad(polyamp.autocast(program, BF16)), in_axes=(None, 0))
    assert set().union(*dots(mixed, W, batch)) == {"bfloat16"}
    assert_close(jax.jit(mixed)(W, batch), jax.vmap(jax.grad(program), in_axes=(None, 0))(W, batch), BF16)


def bounded_while(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return lax.while_loop(
        lambda c: (c[1] < 4) & (jnp.abs(c[0] @ w).max() > -1), lambda c: (layer(w, c[0]), c[1] + 1), (x, 0)
    )


def test_while() -> None:
    mixed = polyamp.autocast(bounded_while, BF16)
    assert dots(mixed, W, X) == [{"bfloat16"}] * 2
    assert_close(mixed(W, X), bounded_while(W, X), BF16)
    tangents = jax.jvp(lambda w: mixed(w, X)[0], (W,), (W,))
    assert_close(tangents, jax.jvp(lambda w: bounded_while(w, X)[0], (W,), (W,)), BF16)


def halved(x: jax.Array, limit: Any = 1.0) -> jax.Array:
    return lax.while_loop(lambda y: jnp.abs(y).max() > limit, lambda y: y * 0.5, x)


def counted(x: jax.Array) -> jax.Array:
    """Carry a count, a flag and a key beside the values."""

    def body(carry: Any) -> Any:
        y, count, flag, key = carry
        key, own = jax.random.split(key)
        return y * 0.75 - 1e-2 * jax.random.uniform(own, y.shape), count + 1, ~flag, key

    def is_large(carry: Any) -> jax.Array:
        return (jnp.abs(carry[0]).max() > 0.7) & (carry[1] < 30)

    y, count, flag, key = lax.while_loop(is_large, body, (x, 0, True, jax.random.key(3)))
    return y * count + flag + jax.random.uniform(key)


def nested_whiles(x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda y: jnp.abs(y).max() > 0.3, lambda y: halved(y, jnp.abs(y).max() * 0.4), x)


LIMITS = jnp.linspace(0.2, 1.2, 6)
PER_EXAMPLE: dict[str, Callable[..., Any]] = {
    "while": lambda w, x: jax.vmap(halved)(x @ w),
    "while of layers": lambda w, x: jax.vmap(lambda y: bounded_while(w, y * 0)[0] + halved(y, 0.1))(x @ w),
    "fori": lambda w, x: jax.vmap(lambda y, n: lax.fori_loop(0, n, lambda _, z: z * 0.9, y))(x @ w, jnp.arange(6) * 2),
    "other state": lambda w, x: jax.vmap(counted)(x @ w),
    "nested": lambda w, x: jax.vmap(nested_whiles)(x @ w),
    "only the condition": lambda w, x: jax.vmap(halved, (None, 0))((x @ w)[3], LIMITS),
    "twice": lambda w, x: jax.vmap(jax.vmap(halved, (0, None)), (None, 0))(x @ w, LIMITS),
    "last axis": lambda w, x: jax.vmap(halved, 1, 1)((x @ w).T),
    "in scan": lambda w, x: jax.vmap(lambda y: lax.scan(lambda z, _: (halved(z * 1.5), None), y, None, length=3)[0])(
        x @ w
    ),
    "expn": lambda w, x: jax.scipy.special.expn(np.arange(1, 9), jnp.abs(x @ w) + 0.1),
}


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(name, MODES[place % 2][0], marks=[pytest.mark.long] * (name == "expn"))
        for place, name in enumerate(PER_EXAMPLE)
    ],
)
def test_a_loop_that_vmap_gave_a_condition_for_each_example(name: str, policy: str) -> None:
    """Examples that are done keep their state while others go on."""

    def both(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda w, x: jax.jvp(lambda w: f(w, x), (w,), (W,))

    program = PER_EXAMPLE[name]
    wanted = jax.jit(both(program))(W, X * 2)
    for mixed in (both(polyamp.autocast(program, policy)), polyamp.autocast(both(program), policy)):
        assert_close(jax.jit(mixed)(W, X * 2), wanted, policy)


@pytest.mark.parametrize("loop", ["scan", "while"])
def test_carried_values_keep_their_traced_types(loop: str) -> None:
    """levanter#569: a carry that changes its type inside the body is refused by lax.scan."""

    def fn(x: jax.Array) -> Any:
        carry = (x, x.astype(jnp.bfloat16), jnp.int8(1), 1.0)
        body = lambda c: (c[0] @ W, (c[1] @ W.astype(jnp.bfloat16)), c[2], c[3] * 0.5)  # noqa: E731
        if loop == "scan":
            return lax.scan(lambda c, _: (body(c), c), carry, None, length=2)
        return lax.while_loop(lambda c: c[3] > 0.3, body, carry)

    mixed = polyamp.autocast(fn, "mixed_float16")
    assert {"float16"} in dots(mixed, X)
    assert_close(mixed(X), fn(X), BF16)


def test_a_scan_without_inputs_or_turns() -> None:
    fn = lambda x: lax.scan(lambda c, _: (c @ W, c.sum()), x, None, length=0)  # noqa: E731
    assert_close(polyamp.autocast(fn, BF16)(X)[1], fn(X)[1], BF16)


@pytest.mark.parametrize("name", ["remat", "remat dots_saveable", "remat nothing_saveable", "remat names"])
def test_remat_saves_what_its_policy_says(name: str) -> None:
    plain, mixed = PROGRAMS[name], polyamp.autocast(PROGRAMS[name], BF16)
    assert sorted(leaf.shape for leaf in residuals(mixed, W, X)) == sorted(
        leaf.shape for leaf in residuals(plain, W, X)
    )
