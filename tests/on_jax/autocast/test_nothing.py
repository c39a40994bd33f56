"""The warnings of autocast and value_and_grad if a policy changes nothing or a rule matches nothing."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import polyamp

W, X = jnp.ones((8, 8)) / 8, jnp.ones((4, 8))


def product(w: Any, x: Any) -> Any:
    return jnp.square(x @ w).mean()


def by_autocast(fn: Any, policy: Any) -> Any:
    return polyamp.autocast(fn, policy)(W, X)


def by_value_and_grad(fn: Any, policy: Any) -> Any:
    tx = polyamp.wrap_optimizer(optax.sgd(0.1), policy)
    return polyamp.value_and_grad(fn, policy)(tx.init(W), W, X)


def by_compiled_step(fn: Any, policy: Any) -> Any:
    tx = polyamp.wrap_optimizer(optax.sgd(0.1), policy)
    return jax.jit(lambda s, w, x: polyamp.value_and_grad(fn, policy)(s, w, x))(tx.init(W), W, X)


ways = pytest.mark.parametrize("way", [by_autocast, by_value_and_grad, by_compiled_step])


@contextmanager
def silence() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", polyamp.PolyampWarning)
        yield


@pytest.mark.parametrize("precision", ["high", "highest", "tensorfloat32", "float32", "BF16_BF16_F32_X3"])
@ways
def test_a_global_precision_that_switches_lowering_off_is_named(way: Any, precision: str) -> None:
    said = rf"changed nothing in product.*jax_default_matmul_precision, which is '{precision}' here.*set it to None"
    with jax.default_matmul_precision(precision):
        with pytest.warns(polyamp.PolyampWarning, match=said) as found:
            way(product, "mixed_float16")
        with silence():
            way(product, "mixed_float16")
    assert len(found) == 1


@pytest.mark.parametrize("precision", ["default", "bfloat16", None])
@ways
def test_a_global_precision_that_leaves_products_alone_is_not(way: Any, precision: Any) -> None:
    with jax.default_matmul_precision(precision) if precision else silence(), silence():
        way(product, "mixed_float16")


def precise(w: Any, x: Any) -> Any:
    return jnp.matmul(x, w, precision="highest").sum()


def in_float64(w: Any, x: Any) -> Any:
    return (w * x[0]).sum()


NOTHING = {
    "precision": (precise, r"matmul at .*\.py:\d+ stays as it is: precision=HIGHEST was asked for\."),
    "no products": (in_float64, "has no float32 operation of class lower, such as matmul"),
    "no floats": (lambda w, x: jnp.float32(1) * (x.astype(int) @ w.astype(int)).sum(), "no float32 operation"),
}


@pytest.mark.parametrize("name", NOTHING)
@ways
def test_each_reason_why_nothing_is_lowered_is_told_once(way: Any, name: str) -> None:
    fn, reason = NOTHING[name]
    with pytest.warns(polyamp.PolyampWarning, match=reason) as found:
        way(fn, "mixed_bfloat16")
    with silence():
        way(fn, "mixed_bfloat16")
    assert len(found) == 1


@pytest.mark.parametrize("rules", [{"matmul": "full"}, {"*": "full"}])
@ways
def test_rules_under_which_nothing_is_lowered_are_named(way: Any, rules: Any) -> None:
    with pytest.warns(polyamp.PolyampWarning, match="stays as it is: rule"):
        way(product, polyamp.policy("mixed_float16", rules=rules))


LOWERED = {
    "as usual": product,
    "one of two": lambda w, x: precise(w, x) + product(w, x),
    "cast by its author": lambda w, x: (x.astype("float16") @ w.astype("float16")).sum().astype("float32"),
    "autocasted already": lambda w, x: polyamp.autocast(product, "mixed_float16")(w, x),
    "kept in float32 on purpose": lambda w, x: polyamp.autocast(product, "float32")(w, x),
}


@pytest.mark.parametrize("name", LOWERED)
@ways
def test_nothing_is_said_where_products_are_16_bit_or_kept_on_purpose(way: Any, name: str) -> None:
    with silence():
        way(LOWERED[name], "mixed_float16")
