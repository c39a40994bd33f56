"""autocast of functions with the user's own rules (with symbolic zeros, of equinox), and of solvers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.ode import odeint

import polyamp
from support.jax_scenarios import MODES, Reference, assert_close, normal, only, walk
from support.jax_scenarios import quickly_compiled as quickly_compiled

pytestmark = pytest.mark.slow

BF16 = "mixed_bfloat16"
W = normal(0, 8, 8, scale=0.3)
X = normal(1, 6, 8)


def loss(y: jax.Array) -> jax.Array:
    return jnp.square(y).mean()


@jax.custom_jvp
def wrong_jvp(w: jax.Array, x: jax.Array) -> jax.Array:
    return x @ w


@wrong_jvp.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (w, x), (dw, dx) = primals, tangents
    return x @ w, 100 * (x @ dw) + dx @ jnp.exp(w * 0)


@jax.custom_vjp
def wrong_vjp(w: jax.Array, x: jax.Array) -> jax.Array:
    return x @ w


def _forward(w: jax.Array, x: jax.Array) -> Any:
    return x @ w, (jnp.exp(w), x, None)


def _backward(kept: Any, ct: jax.Array) -> Any:
    w, x, _ = kept
    return 100 * (x.T @ ct), ct @ w


wrong_vjp.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def static_vjp(factor: float, fn: Any, w: jax.Array, x: jax.Array) -> jax.Array:
    return fn(x @ w) * factor


static_vjp.defvjp(
    lambda factor, fn, w, x: (fn(x @ w) * factor, (w, x)),
    lambda factor, fn, kept, ct: (kept[1].T @ ct * 100 * factor, None),
)

RULES: dict[str, Callable[..., Any]] = {
    "custom_jvp": wrong_jvp,
    "custom_vjp": wrong_vjp,
    "custom_vjp, static": lambda w, x: static_vjp(2.0, jnp.tanh, w, x),
    "in scan": lambda w, x: lax.scan(lambda y, _: (wrong_vjp(w, y), None), x, None, length=3)[0],
    "in remat": lambda w, x: jax.checkpoint(wrong_vjp)(w, x),
    "in jit": lambda w, x: jax.jit(wrong_jvp)(w, x),
    "under vmap": lambda w, x: jax.vmap(wrong_vjp, (None, 0))(w, jnp.stack([x, x], 1))[:, 0],
    "between": lambda w, x: jnp.tanh(wrong_jvp(w, wrong_vjp(w, x @ w))) @ w,
}


@pytest.mark.parametrize("name", RULES)
def test_the_users_derivative_is_kept(name: str) -> None:
    """The rules are wrong on purpose: the right derivative would show that they were dropped (jax-scalify)."""
    plain = Reference(jax.value_and_grad(lambda w, x: loss(RULES[name](w, x))), W, X)
    for policy, inside in MODES:
        inner = jax.value_and_grad(polyamp.autocast(lambda w, x: loss(RULES[name](w, x)), policy))
        plain.check(inner if inside else polyamp.autocast(plain.fn, policy), policy, outside=None, factor=1.5)


MATRIX = jnp.eye(8) * 2 + W @ W.T


def conjugate_gradient(w: jax.Array, x: jax.Array) -> jax.Array:
    return loss(jax.scipy.sparse.linalg.cg(lambda v: MATRIX @ v, (x @ w)[0], tol=1e-4)[0] @ w)


def linear_solve(w: jax.Array, x: jax.Array) -> jax.Array:
    def solve(matvec: Any, b: jax.Array) -> jax.Array:
        return jnp.linalg.solve(MATRIX, b)

    return loss(lax.custom_linear_solve(lambda v: MATRIX @ v, (x @ w)[0], solve, symmetric=True) @ w)


def root(w: jax.Array, x: jax.Array) -> jax.Array:
    target = loss(x @ w)
    solve = lambda f, y: lax.fori_loop(0, 20, lambda _, z: z - f(z) / 2, y)  # noqa: E731
    return lax.custom_root(lambda y: y**2 / 2 - target, jnp.float32(1), solve, lambda g, y: y / g(1.0))


def ode(w: jax.Array, x: jax.Array) -> jax.Array:
    return loss(odeint(lambda y, t, w: jnp.tanh(y @ w), x[0], jnp.linspace(0.0, 1.0, 3), w, rtol=1e-3, atol=1e-3))


def factorised(w: jax.Array, x: jax.Array) -> jax.Array:
    y = (x @ w)[0]
    return loss(jnp.linalg.solve(MATRIX, y) @ w) + jnp.linalg.slogdet(MATRIX + jnp.outer(y, y))[1]


# For each, whether autocast is inside the derivative: both orders of one, and one order of the others.
SOLVERS = {conjugate_gradient: (True, False), linear_solve: (False,), root: (True,), ode: (False,), factorised: (True,)}


@pytest.mark.parametrize(("program", "inside"), [(one, order) for one, orders in SOLVERS.items() for order in orders])
def test_solvers(program: Callable[..., Any], inside: bool) -> None:
    plain = jax.value_and_grad(program)
    mixed = jax.value_and_grad(polyamp.autocast(program, BF16)) if inside else polyamp.autocast(plain, BF16)
    traced = jax.jit(mixed).trace(W, X)
    assert {"bfloat16"} in [op.floats for op in only(walk(traced.jaxpr), "dot_general")]
    assert_close(traced.lower().compile()(W, X), jax.jit(plain)(W, X), BF16, factor=2.0)


# Rules that are entered: with symbolic zeros told or not, of equinox.


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

    @partial(product.defjvp, symbolic_zeros=told)
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


ENTERED = {
    "custom_vjp": with_zeros_vjp,
    "custom_jvp": with_zeros_jvp,
    "equinox": by_equinox,
    "optimize_remat": remembering,
}


@pytest.mark.parametrize(("told", "compiled"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("name", ENTERED)
def test_every_kind_of_own_rule_is_entered(name: str, told: bool, compiled: bool) -> None:
    product = ENTERED[name](told)

    def loss(w: Any, x: Any) -> Any:
        return jnp.square(product(w, x)).sum()

    autocasted = jax.grad(polyamp.autocast(loss, "mixed_float16"))
    found = (jax.jit(autocasted) if compiled else autocasted)(W, X)
    exact = jax.grad(loss)(W, X)
    assert found.dtype == jnp.float32
    assert np.linalg.norm(found - exact) < 2e-3 * np.linalg.norm(exact)
    text = str(jax.make_jaxpr(autocasted)(W, X))
    assert text.count("dot_general") == text.count("preferred_element_type=float16") >= 2  # forward and backward
    formats = [
        op.format for op in polyamp.explain(loss, W, X, policy="mixed_float16").operations if op.name == "matmul"
    ]
    assert formats == ["float16"]


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

    def loss(w: Any) -> Any:
        return jnp.square(product(w, X)).sum()

    grad = jax.grad(polyamp.autocast(loss, "mixed_float16"))
    np.testing.assert_allclose((jax.jit(grad) if compiled else grad)(W), jax.grad(loss)(W), rtol=1e-2, atol=1e-2)


OVER, EYE, DIRECTION = jnp.linspace(300.0, 5000.0, 8)[None], jnp.eye(8), jnp.eye(8) + 0.01
PROGRAMS: dict[str, Callable[..., Any]] = {
    "quotient": lambda w: ((OVER @ w) / (OVER[:, ::-1] @ w)).sum(),
    "maximum": lambda w: (1e-3 / (jnp.maximum((OVER - 2e3) @ w, 0) + 1e-5)).sum(),
}
BY: dict[str, Callable[..., Any]] = {
    "forward": lambda f: lambda w: jax.jvp(f, (w,), (DIRECTION,))[1],
    "backward": jax.grad,
    "mapped": lambda f: lambda w: jax.vmap(jax.grad(f))(jnp.stack([w] * 2)),
    "twice": lambda f: jax.grad(lambda w: jnp.vdot(jax.grad(f)(w), DIRECTION)),
    "forward over backward": lambda f: lambda w: jax.jvp(jax.grad(f), (w,), (DIRECTION,))[1],
}


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("name", PROGRAMS)
def test_derivatives_of_quotients_and_maxima_stay_in_float16(name: str, by: str) -> None:
    autocasted = polyamp.autocast(PROGRAMS[name], "mixed_float16")
    found, wanted = (jax.jit(BY[by](lambda w, f=f: 64 * f(w)))(EYE) for f in (autocasted, PROGRAMS[name]))
    assert jnp.linalg.norm(found - wanted) <= 0.01 * jnp.linalg.norm(wanted)


def with_rule(value: Callable[..., Any], rule: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Return a function whose tangent is ``rule(x, tangent)``."""
    own = jax.custom_jvp(lambda x: value(x))
    own.defjvp(lambda primals, tangents: (own(*primals), rule(*primals, *tangents)))
    return own


def softmax_tangent(x: Any, t: Any) -> Any:
    y = jax.nn.softmax(x)
    return y * (t - (t * y).sum(-1, keepdims=True))


def normalized(x: Any) -> Any:
    return (x - x.mean()) / jnp.sqrt(x.var() + 1e-5)


# Rules that multiply or divide a mean or sum of the tangent: a value that was computed from a smaller one.
REDUCED: dict[str, Callable[..., Any]] = {
    "mean": with_rule(jnp.sin, lambda x, t: jnp.broadcast_to(t.mean(-1, keepdims=True), x.shape) * jnp.cos(x)),
    "sum": with_rule(jnp.sin, lambda x, t: jnp.full(x.shape, t.sum()) * jnp.cos(x) / 8),
    "softmax": with_rule(jax.nn.softmax, softmax_tangent),
    "layer norm": with_rule(normalized, lambda x, t: (t - t.mean()) / jnp.sqrt(x.var() + 1e-5)),
    "zeta": lambda x: jax.scipy.special.zeta(jnp.abs(x) + 2, 3.0),
}
LINEAR: dict[str, Callable[..., Any]] = {
    "grad": jax.grad,
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "linearize": lambda f: lambda w: jax.linearize(f, w)[1](DIRECTION),
    "twice": BY["forward over backward"],
}


@pytest.mark.parametrize(
    ("name", "by"),
    [
        *((name, "grad") for name in REDUCED if name != "zeta"),
        pytest.param("zeta", "grad", marks=pytest.mark.long),
        *(("mean", by) for by in LINEAR if by != "grad"),
    ],
)
@pytest.mark.parametrize("policy", ["mixed_float16", BF16])
def test_rules_that_reduce_the_tangent(policy: str, name: str, by: str) -> None:
    def program(w: jax.Array) -> jax.Array:
        return (REDUCED[name](X @ w) * X).sum()

    mixed, plain = (jax.jit(LINEAR[by](f)) for f in (polyamp.autocast(program, policy), program))
    factor = 3.0 if name == "zeta" else 1.0  # a rounded 2 moves the slope of a pole
    assert_close(mixed(W), plain(W), policy, factor)


def test_a_linear_function_is_transposed() -> None:
    def spread(t: jax.Array) -> jax.Array:
        return (jnp.broadcast_to(t.mean(-1, keepdims=True), t.shape) * jnp.cos(X)) @ W

    mixed, plain = (jax.linear_transpose(f, X)(X)[0] for f in (polyamp.autocast(spread, BF16), spread))
    assert_close(mixed, plain, BF16)
