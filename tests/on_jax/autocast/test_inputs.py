"""Parameters are cast when they meet 16-bit values. The user's own float32 data and large constants are not."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import polyamp
import polyamp.backends.jax
from support.jax_scenarios import POLICIES, X, formats, low, normal
from support.jax_scenarios import quickly_compiled as quickly_compiled

BF16, F16 = "mixed_bfloat16", "mixed_float16"
W = normal(0, 8, 8, scale=0.3)
SHIFT = jnp.full(8, 3.0)


def added(w: Any, x: Any, other: Any) -> Any:
    return x @ w + other


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_argument_is_cast_and_others_are_not(policy: str) -> None:
    def both(p: Any, x: Any, other: Any) -> Any:
        return x @ p["w"] + p["b"], x @ p["w"] - other

    mixed = polyamp.autocast(both, policy)
    parameters = {"w": W, "b": SHIFT}
    assert formats(mixed, parameters, X, SHIFT, of=("add",)) == {low(policy)}
    assert "float32" in formats(mixed, parameters, X, SHIFT, of=("sub",))


@pytest.mark.parametrize(
    ("argnums", "expected"), [(None, "float32"), (0, "float32"), ((0, 2), "bfloat16"), ([0, 2], "bfloat16")]
)
def test_the_public_verbs_take_argnums(argnums: Any, expected: str) -> None:
    assert formats(polyamp.autocast(added, BF16, argnums=argnums), W, X, SHIFT, of=("add",)) == {expected}
    plan = polyamp.rewrite(added, W, X, SHIFT, policy=BF16, argnums=argnums).plan
    (row,) = [one for one in plan.operations if one.name == "add"]
    assert row.format == expected
    assert (row.reason == "next to an input") is (expected == "float32")


def test_argnums_without_a_function_are_refused() -> None:
    with pytest.raises(polyamp.errors.InvalidTypeError, match="argnums needs a function"):
        polyamp.autocast(BF16, argnums=1)


class Dense(eqx.Module):
    weight: Any
    bias: Any

    def __call__(self, x: Any) -> Any:
        return x @ self.weight + self.bias


class Layer(nnx.Module):
    def __init__(self) -> None:
        self.dense = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.dense(x)


def test_what_modules_hold_is_a_parameter_wherever_they_are() -> None:
    model, layer = Dense(W, SHIFT), Layer()
    calls: dict[str, Callable[[Any, Any], Any]] = {
        "itself": lambda model, x: polyamp.autocast(model, BF16)(x),
        "in a closure": lambda model, x: polyamp.autocast(lambda y: model(y), BF16)(x),
        "under vmap": lambda model, x: polyamp.autocast(jax.vmap(model), BF16)(x),
        "a method": lambda model, x: polyamp.autocast(model.__call__, BF16)(x),
        "the second argument": lambda model, x: polyamp.autocast(lambda y, m: m(y), BF16)(x, model),
        "by keyword": lambda model, x: polyamp.autocast(lambda y, m: m(y), BF16)(x, m=model),
    }
    for name, call in calls.items():
        assert formats(call, model, X, of=("add",)) == {"bfloat16"}, name
    assert formats(lambda x: polyamp.autocast(lambda y, m: m(y), BF16)(x, layer), X, of=("add",)) == {"bfloat16"}


def test_what_is_taken_from_around_a_function_is_an_input() -> None:
    def outer(w: Any, x: Any, other: Any) -> Any:
        return polyamp.autocast(lambda own: added(own, x, other), BF16)(w)

    assert "float32" in formats(outer, W, X, SHIFT, of=("add",))


@pytest.mark.parametrize("policy", POLICIES)
def test_value_and_grad_knows_its_parameters(policy: str) -> None:
    tx = polyamp.wrap_optimizer(optax.sgd(0.1), policy)

    def loss(p: Any, x: Any, model: Dense, other: Any) -> Any:
        return ((model(x @ p["w"] + p["b"]) @ p["w"] - other) ** 2).mean()

    def run(p: Any, x: Any, model: Dense, other: Any) -> Any:
        return polyamp.value_and_grad(loss, policy)(tx.init(p), p, x, model, other)

    arguments = {"w": W, "b": SHIFT}, X, Dense(W, SHIFT), SHIFT
    assert formats(run, *arguments, of=("add",)) == {low(policy)}
    assert "float32" in formats(run, *arguments, of=("sub",))


@pytest.mark.parametrize("policy", POLICIES)
def test_integers_become_inputs_and_booleans_do_not(policy: str) -> None:
    def labelled(w: Any, x: Any, labels: Any) -> Any:
        return x @ w + labels.astype(jnp.float32)

    mixed = polyamp.autocast(labelled, policy)
    assert "float32" in formats(mixed, W, X, jnp.arange(8), of=("add",))
    assert formats(mixed, W, X, jnp.arange(8) > 3, of=("add",)) == {low(policy)}


_ahead = jax.jit(lambda z: jnp.tanh(z - 1.0))

SQUARES: dict[str, Callable[[Any], Any]] = {
    "itself": lambda h: h * h,
    "its absolute value": lambda h: jnp.abs(h) * jnp.abs(h),
    "its negative": lambda h: -h * h,
    "computed twice": lambda h: (h - 1.0) * (h - 1.0),
    "relu": lambda h: jax.nn.relu(h) * jax.nn.relu(h),
    "reshaped": lambda h: h.reshape(-1) * h.reshape(h.size),
    "reshaped twice": lambda h: (h.reshape(-1).reshape(h.shape) * h).reshape(-1),
    "transposed": lambda h: h.T * h.T,
    "real": lambda h: jnp.real(h * jnp.conj(h)),
    "into a jitted function": lambda h: jax.jit(lambda a, b: a * b)(h, h),
    "out of one": lambda h: _ahead(h) * _ahead(h),
    "in a checkpoint": lambda h: jax.checkpoint(lambda a: a * a)(h),
    "broadcast": lambda h: jnp.broadcast_to(h[:1], (3, 8)) * jnp.broadcast_to(h[:1], (3, 8)),
    "stopped": lambda h: h * jax.lax.stop_gradient(h),
}
OTHERS: dict[str, Callable[[Any], Any]] = {
    "its transpose": lambda h: h[:4, :4] * h[:4, :4].T,
    "another": lambda h: h * (h + 1.0),
    "another out of a jitted function": lambda h: _ahead(h) * _ahead(h + 1.0),
}


@pytest.mark.parametrize("name", [*SQUARES, *OTHERS])
def test_a_product_of_a_value_with_itself_is_a_square(name: str) -> None:
    plan = polyamp.explain(lambda w, x: (SQUARES | OTHERS)[name](x @ w), W, X, policy=F16)
    found = {(op.name, op.format) for op in plan.operations if op.name in ("square", "mul")}
    assert found == {("square", "float32") if name in SQUARES else ("mul", "float16")}


RECIPROCALS: dict[str, Callable[[Any], Any]] = {
    "division": lambda h: 1.0 / h,
    "of an array": lambda h: jnp.array([1.0, 2.0, 3.0, 4.0]) / h,
    "power": lambda h: h**-1,
    "of ones": lambda h: jnp.ones_like(h) / h,
    "in a jitted function": lambda h: jax.jit(lambda one: 2.0 / one)(h),
}


@pytest.mark.parametrize("name", RECIPROCALS)
def test_a_constant_over_a_value_is_a_reciprocal(name: str) -> None:
    def fn(x: Any) -> Any:
        return RECIPROCALS[name](jax.nn.relu(x @ jnp.eye(4)) + 1e-5)

    out = polyamp.autocast(fn, F16)(-jnp.ones((2, 4)))
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out, fn(-jnp.ones((2, 4))), rtol=2e-2)


@jax.jit
def _probability(z: Any) -> Any:
    return 1 - jax.nn.sigmoid(-(z * 1.0))


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_what_was_rounded_in_a_function_called_twice_is_computed_again_for_a_logarithm(policy: str) -> None:
    """The factor acts as a loss scale does: 1e12 times the gradient is inf in float16."""

    def loss(w: Any, x: Any) -> Any:
        z = x @ w
        return (jnp.log(_probability(z) + 1e-6).mean() + jnp.log(_probability(z + 1.0) + 1e-6).mean()) * 1024.0

    x = jnp.array([[12.0, -12.0, 3.0, -3.0], [30.0, -18.0, 0.5, 6.0]])
    expected = jax.value_and_grad(loss)(jnp.eye(4), x)
    found = jax.jit(jax.value_and_grad(polyamp.autocast(loss, policy)))(jnp.eye(4), x)
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-2)
    np.testing.assert_allclose(found[1], expected[1], rtol=5e-2, atol=5e-3 * float(jnp.abs(expected[1]).max()))


@pytest.mark.parametrize("policy", POLICIES)
def test_probabilities_that_a_function_returns_are_not_rounded(policy: str) -> None:
    """The caller may take a logarithm."""
    model = polyamp.autocast(lambda w, x: jax.nn.sigmoid(x @ w), policy)
    x = jnp.array([[-10.0, 9.0, 0.0, 12.0]])
    np.testing.assert_allclose(1 - model(jnp.eye(4), x), 1 - jax.nn.sigmoid(x), rtol=1e-2)


def test_argnums_that_are_no_positions_are_refused() -> None:
    with pytest.raises(polyamp.PolyampError, match="argnums are not positions"):
        polyamp.backends.jax.autocast(added, BF16, argnums="w")  # type: ignore[arg-type]


# --- parameters beyond the format's range -----------------------------------------------------------------------------

LARGE = {"w": jnp.eye(8), "deviation": jnp.full(8, 1e5), "mean": jnp.full(8, 1e6)}
SCALED: dict[str, Callable[[Any, Any], Any]] = {
    "multiplied": lambda p, y: y * p["deviation"] * 1e-5,
    "divided": lambda p, y: y / p["deviation"] * 1e5,
    "broadcast": lambda p, y: y * jnp.broadcast_to(p["deviation"][None], y.shape) * 1e-5,
    "denormalised": lambda p, y: (y * p["deviation"] + p["mean"]) * 1e-6,
    "compared with a target": lambda p, y: ((y * p["deviation"] + p["mean"] - X * 1e6) ** 2).mean() * 1e-12,
    "returned": lambda p, y: y * p["deviation"],
}
OUTSIDE_OF_JIT: dict[str, Callable[[Any, Any], Any]] = {
    "added": lambda p, y: (y + p["mean"]) * 1e-6,
    "clipped": lambda p, y: jax.nn.relu(y * p["deviation"]) * 1e-5,
    "a factor of products": lambda p, y: y @ jnp.diag(p["deviation"]) * 1e-5,
}


@pytest.mark.parametrize("function", SCALED.values(), ids=list(SCALED))
def test_a_parameter_beyond_the_format_may_scale_values_under_jit(function: Callable[[Any, Any], Any]) -> None:
    def loss(p: Any, x: Any) -> Any:
        found = function(p, x @ p["w"])
        weights = jnp.cos(jnp.arange(found.size)).reshape(found.shape)
        return (found * weights).sum() * 1e-3, found  # gradients of 16-bit values have a loss scale

    exact = jax.value_and_grad(loss, has_aux=True)(LARGE, X)
    found = jax.jit(jax.value_and_grad(polyamp.autocast(loss, F16), has_aux=True))(LARGE, X)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        assert jnp.linalg.norm(ours - theirs) <= 4e-3 * jnp.linalg.norm(theirs)


@pytest.mark.parametrize("function", (SCALED | OUTSIDE_OF_JIT).values(), ids=list(SCALED | OUTSIDE_OF_JIT))
def test_parameters_are_looked_at_outside_of_jit(function: Callable[[Any, Any], Any]) -> None:
    def whole(p: Any, x: Any) -> Any:
        return function(p, x @ p["w"])

    expected = whole(LARGE, X)
    assert jnp.abs(polyamp.autocast(whole, F16)(LARGE, X) - expected).max() <= 2e-3 * jnp.abs(expected).max()


def test_explain_and_lint_say_what_becomes_of_such_a_parameter() -> None:
    def scaled(p: Any, x: Any) -> Any:
        return (x @ p["w"]) * p["deviation"]

    (op,) = (op for op in polyamp.explain(scaled, LARGE, X, policy=F16).operations if op.native == "mul")
    assert (op.format, op.reason) == ("float32", "the numbers of a parameter are not known")
    assert "unless they only scale values" in str(polyamp.lint(scaled, LARGE, X, policy=F16))
    (op,) = (op for op in polyamp.explain(scaled, LARGE, X, policy=BF16).operations if op.native == "mul")
    assert op.format == "bfloat16"
