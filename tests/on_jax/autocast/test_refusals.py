"""Errors and warnings of autocast in JAX name the problem, the user's line and a fix; nothing changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import Primitive
from jax.interpreters import mlir

import polyamp
import polyamp.backends.jax as amp
from polyamp.errors import InvalidTypeError, InvalidValueError, PolyampError, PolyampWarning, UnsupportedError
from support.jax_scenarios import X, dots, normal
from support.jax_scenarios import quickly_compiled as quickly_compiled

BF16 = "mixed_bfloat16"
W = normal(0, 8, 8, scale=0.3)
HERE = Path(__file__).name


def by_if(x: Any) -> Any:
    if (x @ W).sum() > 0:
        return x
    return -x


def by_float(x: Any) -> Any:
    return x @ W * float(x.mean())


def by_range(x: Any) -> Any:
    return [x @ W for _ in range(x.astype(int)[0, 0])]


def by_numpy(x: Any) -> Any:
    return x @ W + np.sin(x)


def by_mask(x: Any) -> Any:
    return (x @ W)[x[:, 0] > 0]


BRANCHING = [by_if, by_float, by_range, by_numpy, by_mask]  # each another error of JAX's


@pytest.mark.parametrize(
    ("fn", "how"),
    [*((fn, "called") for fn in BRANCHING), *((by_if, how) for how in ("rewritten", "explained", "under jit"))],
)
def test_functions_that_look_at_traced_values(fn: Callable[..., Any], how: str) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "called": lambda: polyamp.autocast(fn, BF16)(X),
        "rewritten": lambda: polyamp.rewrite(fn, X, policy=BF16),
        "explained": lambda: polyamp.explain(fn, X, policy=BF16),
        "under jit": lambda: jax.jit(polyamp.autocast(fn, BF16))(X),
    }
    with pytest.raises(PolyampError) as refused:
        calls[how]()
    text = str(refused.value)
    line = fn.__code__.co_firstlineno + 1
    assert f"{HERE}:{line}" in text
    assert "jax.lax.cond" in text
    assert "to do:" in text


def test_an_error_of_the_users_own_is_the_users() -> None:
    def fn(x: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        polyamp.autocast(fn, BF16)(X)
    with pytest.raises((TypeError, ValueError), match="dot"):
        polyamp.autocast(lambda x: jax.lax.dot(x, jnp.ones((3, 3))), BF16)(X)


def test_a_captured_nnx_module_that_changes() -> None:
    model = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    before = np.array(model.mean[...])

    def fn(x: Any) -> Any:
        return model(x @ W)

    with pytest.raises(PolyampError) as refused:
        polyamp.autocast(fn, BF16)(X)
    assert f"{HERE}:{fn.__code__.co_firstlineno + 1}" in str(refused.value)
    assert "argument" in str(refused.value)
    np.testing.assert_array_equal(model.mean[...], before)


def test_a_captured_nnx_module_that_does_not_change_is_welcome() -> None:
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    assert dots(polyamp.autocast(lambda x: model(x), BF16), X) == [{"bfloat16"}]


@pytest.mark.parametrize("compute", ["float8_e4m3fn", "float8_e5m2", "float64", "tensorfloat32"])
def test_formats_that_jax_cannot_cast_to(compute: str) -> None:
    policy = polyamp.policy(param="float32", compute=compute, output="float32", loss_scale=polyamp.LossScale.none())
    for call in (
        lambda: polyamp.autocast(lambda x: x @ W, policy)(X),
        lambda: polyamp.rewrite(lambda x: x @ W, X, policy=policy),
        lambda: polyamp.explain(lambda x: x @ W, X, policy=policy),
    ):
        with pytest.raises(UnsupportedError, match=compute) as refused:
            call()
        assert "bfloat16" in str(refused.value)
        assert "to do:" in str(refused.value)


def test_a_policy_that_changes_nothing_changes_nothing() -> None:
    np.testing.assert_array_equal(polyamp.autocast(lambda x: x @ W, "float32")(X), X @ W)


only_float32 = Primitive("only_float32")


@only_float32.def_impl
def _impl(x: jax.Array) -> jax.Array:
    return x * 2


@only_float32.def_abstract_eval
def _abstract(x: Any) -> Any:
    if x.dtype != jnp.float32:
        raise ValueError(f"only_float32 takes float32, not {x.dtype}")
    return x


mlir.register_lowering(only_float32, mlir.lower_fun(_impl, multiple_results=False))


def test_an_unknown_primitive_runs_as_the_user_wrote_it() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return only_float32.bind(x @ W) @ W

    mixed = polyamp.autocast(fn, BF16)
    assert dots(mixed, X) == [{"bfloat16"}] * 2
    assert mixed(X).dtype == jnp.float32
    operations = polyamp.explain(fn, X, policy=BF16).as_dict()["operations"]
    assert [(op["format"], op["native"]) for op in operations if op["name"] == "only_float32"] == [
        ("as written", "only_float32")
    ]


@pytest.mark.parametrize("op_class", ["lower", "follow"])
def test_a_rule_that_an_unknown_primitive_cannot_keep(op_class: str) -> None:
    """The primitive decides about its types; the error names the rule, the primitive and the line."""

    def fn(x: jax.Array) -> jax.Array:
        return only_float32.bind(x @ W) @ W

    policy = polyamp.policy(BF16, rules={"only_float32": op_class})
    with pytest.raises((PolyampError, PolyampWarning)) as refused:
        jax.jit(polyamp.autocast(fn, policy))(X)
    text = str(refused.value)
    assert "rule 'only_float32'" in text
    assert f"{HERE}:{fn.__code__.co_firstlineno + 1}" in text


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: polyamp.autocast(lambda x: x, "mixed_float17"), InvalidValueError),
        (lambda: polyamp.autocast(lambda x: x, 16), InvalidTypeError),
        (lambda: polyamp.autocast(X, BF16), InvalidTypeError),
        (lambda: polyamp.rewrite(3, X, policy=BF16), InvalidTypeError),
        (lambda: polyamp.explain("model", X, policy=BF16), InvalidTypeError),
        (lambda: polyamp.rewrite(lambda x: x, X, policy="nonsense"), InvalidValueError),
        (lambda: polyamp.rewrite(lambda x: x, policy=BF16).plan, PolyampError),
    ],
)
def test_arguments_that_are_wrong(call: Callable[[], Any], kind: type[Exception]) -> None:
    with pytest.raises(kind) as refused:
        call()
    assert "to do:" in str(refused.value)


def test_a_context_says_that_jax_functions_are_transformed() -> None:
    with (
        pytest.raises(UnsupportedError, match=r"JAX functions are transformed: polyamp.autocast\(function, policy\)"),
        polyamp.autocast(BF16, backend="jax"),
    ):
        pass


@pytest.mark.parametrize("autocast", [polyamp.autocast, amp.autocast])
def test_warnings_point_at_the_call(autocast: Any) -> None:
    with pytest.warns(PolyampWarning) as said:
        jax.jit(autocast(lambda n: n + 1, BF16))(jnp.arange(3))
    assert said[0].filename.endswith(HERE)
