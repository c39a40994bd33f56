"""autocast over four devices, run by test_devices.py in a process that has eight."""

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

X = normal(4, 8, 8)
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
