"""autocast of JAX functions: every kind of argument and type, effects, references, kernels, ahead of time."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import io_callback
from jax.experimental import pallas as pl

import polyamp
from support.jax_scenarios import MLP, X, assert_close, dots, mlp, normal
from support.jax_scenarios import quickly_compiled as quickly_compiled

BF16 = "mixed_bfloat16"
W = normal(0, 8, 8, scale=0.3)


class Batch(NamedTuple):
    x: Any
    label: Any
    note: Any = None


# Every value comes back with its type: only float32 arrays are ever cast.
ARGUMENTS: dict[str, Any] = {
    "int array": jnp.arange(3),
    "uint8": jnp.arange(3, dtype=jnp.uint8),
    "bool array": jnp.array([True, False]),
    "float16": jnp.ones(3, jnp.float16),
    "bfloat16": jnp.ones(3, jnp.bfloat16),
    "float8": jnp.ones(3, jnp.float8_e4m3fn),
    "complex64": jnp.ones(3, jnp.complex64),
    "typed key": jax.random.key(0),
    "raw key": jax.random.PRNGKey(0),
    "numpy float32": np.ones(3, np.float32),
    "numpy int16": np.ones(3, np.int16),
    "numpy scalar": np.float32(2),
    "empty": jnp.zeros((0, 3)),
    "tree": {"a": [jnp.ones(2), None], "b": Batch(jnp.ones(2), jnp.arange(2))},
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_values_pass_through_unchanged(kind: str) -> None:
    value = ARGUMENTS[kind]
    same, product = polyamp.autocast(lambda v, x: (v, x @ W), BF16)(value, X)
    plain, _ = jax.jit(lambda v, x: (v, x @ W))(value, X)
    assert product.dtype == jnp.float32
    assert jax.tree.structure(same) == jax.tree.structure(plain)
    assert [leaf.dtype for leaf in jax.tree.leaves(same)] == [leaf.dtype for leaf in jax.tree.leaves(plain)]


def test_python_values_stay_what_they_are() -> None:
    """A function may branch on its flags, numbers and names, as it does outside of jit."""

    def fn(x: Any, train: bool, depth: int, mode: str, extra: None, *, rate: float = 0.5) -> Any:
        assert (type(train), type(depth), type(rate)) == (bool, int, float)
        for _ in range(depth):
            x = x @ W if train and mode == "dense" and extra is None else x
        return x * rate

    mixed = polyamp.autocast(fn, BF16)
    assert dots(lambda x: mixed(x, True, 3, "dense", None, rate=0.25), X) == [{"bfloat16"}] * 3
    assert mixed(X, True, 1, "dense", None).dtype == jnp.float32


def test_static_arguments_and_donation() -> None:
    mixed = polyamp.autocast(jax.jit(lambda x, n: x @ W * n, static_argnums=1), BF16)
    assert dots(lambda x: mixed(x, 3), X) == [{"bfloat16"}]
    inside = polyamp.autocast(jax.jit(lambda x: x @ W, donate_argnums=0), BF16)  # inlined, it would not donate
    assert dots(inside, X) == [{"bfloat16"}]
    outside = jax.jit(polyamp.autocast(lambda x: x @ W, BF16), donate_argnums=0)
    for step in (inside, outside):
        given = jnp.array(X)
        step(given)
        assert given.is_deleted()


def test_double_precision_is_left_alone() -> None:
    with jax.enable_x64(True):
        wide = jnp.asarray(np.asarray(W), jnp.float64)

        def fn(x: Any) -> Any:
            return x @ W, wide @ wide, jnp.exp(wide)

        mixed = polyamp.autocast(fn, BF16)
        assert dots(mixed, X) == [{"bfloat16"}, {"float64"}]
        assert [out.dtype.name for out in mixed(X)] == ["float32", "float64", "float64"]
        np.testing.assert_array_equal(mixed(X)[1], wide @ wide)


@pytest.mark.parametrize("dtype", ["int8", "int32", "complex64", "float16", "bfloat16"])
def test_products_of_other_types_run_as_written(dtype: str) -> None:
    other = jnp.asarray(np.arange(64).reshape(8, 8) % 5, dtype)
    preferred = jnp.int32 if dtype == "int8" else None
    mixed = polyamp.autocast(
        lambda x: (x @ W, jnp.matmul(other, other, preferred_element_type=preferred)), "mixed_bfloat16"
    )
    product = mixed(X)[1]
    assert product.dtype == jnp.dtype("int32" if dtype == "int8" else dtype)
    np.testing.assert_array_equal(product, jnp.matmul(other, other, preferred_element_type=preferred))


def test_random_numbers_are_those_of_float32() -> None:
    def fn(key: Any, x: Any) -> Any:
        keys = jax.random.split(key, 3)
        drawn = (
            jax.random.normal(keys[0], (9,)),
            jax.random.uniform(keys[1], (9,)),
            jax.random.bernoulli(keys[2], 0.3, (9,)),
        )
        return *drawn, x @ W

    for key in (jax.random.key(3), jax.random.PRNGKey(3)):
        jax.tree.map(np.testing.assert_array_equal, polyamp.autocast(fn, BF16)(key, X)[:3], fn(key, X)[:3])


@pytest.mark.parametrize("ordered", [True, False])
def test_callbacks_see_what_was_declared(ordered: bool) -> None:
    seen = []

    def fn(x: Any) -> Any:
        y = x @ W
        jax.debug.print("{}", y[0, 0], ordered=ordered)
        jax.debug.callback(lambda v: seen.append(("debug", v.dtype.name)), y, ordered=ordered)
        kept = io_callback(
            lambda v: seen.append(("io", v.dtype.name)) or np.float32(1), jnp.float32(0), y, ordered=ordered
        )
        return jax.pure_callback(lambda v: np.sin(v), y, y) * kept

    result = jax.jit(polyamp.autocast(fn, BF16))(X)
    jax.effects_barrier()
    assert_close(result, jnp.sin(X @ W), BF16)
    assert sorted(seen) == [("debug", "float32"), ("io", "float32")]


def test_references_to_mutable_state() -> None:
    def fn(x: Any) -> Any:
        ref = jax.new_ref(jnp.zeros((6, 8)))
        ref[...] += x @ W
        ref[0] = ref[0] * 2
        return ref[...] @ W

    assert dots(polyamp.autocast(fn, BF16), X) == [{"bfloat16"}] * 2
    assert_close(jax.jit(polyamp.autocast(fn, BF16))(X), jax.jit(fn)(X), BF16)


def test_pallas_kernels_run_as_written() -> None:
    def kernel(x_ref: Any, y_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] + y_ref[...] * 2

    shape = jax.ShapeDtypeStruct((6, 8), jnp.float32)

    def fn(x: Any) -> Any:
        return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x, x @ W) @ W

    assert dots(polyamp.autocast(fn, BF16), X) == [{"bfloat16"}] * 2
    assert_close(jax.jit(polyamp.autocast(fn, BF16))(X), fn(X), BF16)


def test_export() -> None:
    mixed = jax.jit(polyamp.autocast(mlp, BF16))
    exported = export.export(mixed)(MLP, X)
    assert "bf16" in exported.mlir_module()
    assert exported.call(MLP, X) == mixed(MLP, X)
    assert "bf16" in exported.vjp().mlir_module()
    assert_close(jax.grad(exported.call)(MLP, X), jax.grad(mlp)(MLP, X), BF16)


def test_symbolic_shapes() -> None:
    (batch,) = export.symbolic_shape("batch")
    mixed = jax.jit(polyamp.autocast(mlp, BF16))
    exported = export.export(mixed)(MLP, jax.ShapeDtypeStruct((batch, 8), jnp.float32))
    for size in (1, 6):
        assert_close(exported.call(MLP, X[:size]), mlp(MLP, X[:size]), BF16)
