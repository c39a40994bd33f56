"""The framework of a function is the one that its code names, if its arguments do not show it."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp.adapters import adapter_named_in

X = np.full((2, 2), 1 / 3, np.float32)


def in_tensorflow(x: Any = X) -> Any:
    return tf.matmul(x, x)


def in_jax(x: Any = X) -> Any:
    return jnp.matmul(x, x)


def in_both(x: Any = X) -> Any:
    return jnp.matmul(tf.constant(x).numpy(), x)


def in_a_closure() -> Callable[[], Any]:
    weight = tf.Variable(X)
    return lambda: weight @ weight


def in_an_inner_function(x: Any = X) -> Any:
    def product() -> Any:
        return tf.matmul(x, x)

    return product()


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (in_tensorflow, "tensorflow"),
        (in_jax, "jax"),
        (in_a_closure(), "tensorflow"),
        (in_an_inner_function, "tensorflow"),
        (in_both, None),
        (len, None),
    ],
)
def test_the_framework_that_the_code_names(fn: Callable[..., Any], name: str | None) -> None:
    found = adapter_named_in("rewrite", fn)
    assert (found.name if found else None) == name


@pytest.mark.parametrize("fn", [in_tensorflow, in_jax, in_a_closure(), in_an_inner_function])
def test_steps_without_arguments_are_rewritten(fn: Callable[..., Any]) -> None:
    fast = polyamp.rewrite(fn, policy="mixed_bfloat16")
    assert 1e-5 < abs(float(fast()[0, 0]) - 2 / 9) < 1e-2
    assert "bfloat16" in fast.plan.totals["by_format"]


def test_a_step_that_names_several_asks_which() -> None:
    with pytest.raises(polyamp.errors.InvalidTypeError, match="backend="):
        polyamp.rewrite(in_both, policy="mixed_bfloat16")()


def test_a_functions_own_attributes_are_there_before_its_first_call() -> None:
    fast = polyamp.rewrite(in_tensorflow, policy="mixed_bfloat16")
    assert fast.get_concrete_function(tf.TensorSpec((2, 2))).output_shapes == (2, 2)
    with pytest.raises(AttributeError, match="before its first call"):
        _ = polyamp.rewrite(in_both, policy="mixed_bfloat16").get_concrete_function


@pytest.mark.parametrize("backend", ["jax", "tensorflow", "keras"])
def test_a_framework_without_a_region_to_enter_is_told_what_to_write(backend: str) -> None:
    says = r"polyamp\.autocast\(function(?s:.*)polyamp\.rewrite\(step(?s:.*)polyamp\.convert\(model"
    with pytest.raises(polyamp.errors.UnsupportedError, match=says):
        polyamp.autocast("mixed_float16", backend=backend).__enter__()
