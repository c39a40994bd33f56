"""autocast over four devices, run by test_devices.py in a process that has eight."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import polyamp
from support.jax_scenarios import MLP, assert_close, dots, mlp, normal
from support.jax_scenarios import quickly_compiled as quickly_compiled

X, W = normal(4, 8, 8), normal(5, 8, 8, scale=0.3)
BF16 = "mixed_bfloat16"


def mesh(axis_type: Any = jax.sharding.AxisType.Auto) -> Mesh:
    return jax.make_mesh((4,), ("data",), axis_types=(axis_type,))


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(inside: bool, check_vma: bool) -> None:
    specs: dict[str, Any] = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": check_vma}

    def body(p: Any, x: Any) -> Any:
        return lax.pmean(mlp(p, x), "data")

    mapped = jax.shard_map(polyamp.autocast(body, BF16) if inside else body, mesh=mesh(), **specs)
    mixed = jax.jit(jax.grad(mapped if inside else polyamp.autocast(mapped, BF16)))
    assert dots(mixed, MLP, X) == [{"bfloat16"}] * 5
    assert_close(jax.device_get(mixed(MLP, X)), jax.device_get(jax.grad(mlp)(MLP, X)), BF16)


def with_jvp(value: Callable[..., Any], rule: Callable[..., Any]) -> Callable[..., Any]:
    own = jax.custom_jvp(lambda x: value(x))
    own.defjvp(lambda primals, tangents: (value(*primals), rule(*primals, *tangents)))
    return own


def linear(collective: Callable[..., Any]) -> Callable[..., Any]:
    return with_jvp(collective, lambda x, t: collective(t))


def with_vjp(value: Callable[..., Any], forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    own = jax.custom_vjp(lambda x: value(x))
    own.defvjp(lambda x: (value(x), forward(x)), lambda kept, g: (backward(kept, g),))
    return own


def root(y: Any) -> Any:
    target, one = y.mean(), jnp.ones_like(y.mean())
    solve = lambda f, z: lax.fori_loop(0, 10, lambda _, z: z - f(z) / (3 * z**2 + 1), z)  # noqa: E731
    return lax.custom_root(lambda z: z**3 + z - target, one, solve, lambda g, b: b / g(one))


RAMP = np.linspace(0, 1, 8, dtype=np.float32)
SWAPPED = [(0, 1), (1, 0), (2, 3), (3, 2)]
OWN_RULES: dict[str, Callable[..., Any]] = {
    **{name: getattr(jax.nn, name) for name in ("relu", "relu6", "softplus", "silu", "log_sigmoid")},
    "logaddexp": lambda y: jnp.logaddexp(y, 0.3),
    "xlog1py": lambda y: jax.scipy.special.xlog1py(y, jnp.abs(y)),
    "custom_root": root,
    "straight through": with_vjp(jnp.round, lambda x: None, lambda kept, g: g),
    "constants in custom_vjp": with_vjp(
        lambda x: jnp.sin(x) * RAMP, lambda x: x * 2.0, lambda kept, g: jnp.where(kept > 9, 1.0, g * jnp.cos(kept / 2))
    ),
    "constants in custom_jvp": with_jvp(lambda x: jnp.sin(x) * RAMP, lambda x, t: t * jnp.cos(x) * RAMP),
    "in checkpoint": jax.checkpoint(lambda y: jax.nn.relu(y * RAMP)),
    "in scan": lambda y: lax.scan(lambda c, _: (jax.nn.relu(c + 0.1), None), y, None, length=3)[0],
    "psum": linear(lambda x: lax.psum(x, "data")),
    "pcast": linear(lambda x: lax.pcast(lax.psum(x, "data"), "data", to="varying")),
    "ppermute": linear(lambda x: lax.ppermute(x, "data", SWAPPED)),
    "all_gather": linear(lambda x: lax.all_gather(x, "data")),
}


@pytest.mark.parametrize(("name", "inside"), [(name, place % 2 > 0) for place, name in enumerate(OWN_RULES)])
def test_own_derivatives_in_shard_map(name: str, inside: bool) -> None:
    """An array varies along the axes that it varied along before, also in the rule: ``check_vma`` is JAX's default."""

    def loss(w: Any, x: Any) -> Any:
        y = OWN_RULES[name](x @ w)
        return (y * jnp.cos(jnp.arange(y.size).reshape(y.shape))).sum()

    def gradient(loss: Any) -> Any:
        specs = {"mesh": mesh(), "in_specs": (P(), P("data"))}
        if inside:
            return jax.shard_map(jax.grad(loss, (0, 1)), out_specs=specs["in_specs"], **specs)
        mapped = jax.shard_map(lambda w, x: lax.psum(loss(w, x), "data"), out_specs=P(), **specs)
        return jax.grad(mapped, (0, 1))

    mixed, plain = (jax.jit(gradient(f))(W, X) for f in (polyamp.autocast(loss, "mixed_float16"), loss))
    assert_close(jax.device_get(mixed), jax.device_get(plain), "mixed_float16")


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_pmap(inside: bool) -> None:
    def body(p: Any, x: Any) -> Any:
        return lax.pmean(jax.grad(mlp)(p, x), "i")

    per_device = polyamp.autocast(body, BF16) if inside else body
    mapped = jax.pmap(per_device, "i", in_axes=(None, 0), out_axes=None)
    mixed = mapped if inside else polyamp.autocast(mapped, BF16)
    ours = jax.device_get(mixed(MLP, X.reshape(4, 2, 8)))
    assert_close(ours, jax.device_get(jax.grad(mlp)(MLP, X)), BF16)


def test_shardings_of_a_jit_are_kept() -> None:
    sharded, whole = NamedSharding(mesh(), P("data")), NamedSharding(mesh(), P())
    inner = jax.jit(lambda w, x: x @ w, in_shardings=(whole, sharded), out_shardings=sharded)
    out = jax.jit(polyamp.autocast(inner, BF16))(MLP["w1"], X)
    assert out.sharding.is_equivalent_to(sharded, 2)
    assert dots(polyamp.autocast(inner, BF16), MLP["w1"], X) == [{"bfloat16"}]


def test_explicit_sharding() -> None:
    explicit = mesh(jax.sharding.AxisType.Explicit)
    with jax.set_mesh(explicit):
        x = jax.device_put(np.asarray(X), NamedSharding(explicit, P("data")))
        out = jax.jit(polyamp.autocast(lambda p, x: jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"], BF16))(MLP, x)
        assert jax.typeof(out).sharding.spec == P("data", None)
