"""Gradients of values that are used several times add up in float32, and outputs asked for in float32 stay so."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import polyamp

W, X = jnp.ones((8, 8)) / 8, jnp.ones((4, 8))
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
    def loss(w: Any) -> Any:
        return TAKEN[name](X @ w).sum()

    grad = jax.jit(jax.grad(polyamp.autocast(loss, "mixed_bfloat16")))
    np.testing.assert_allclose(grad(W), jax.grad(loss)(W), rtol=1e-2)


def products(preferred: Any) -> dict[str, Any]:
    contraction = (((1,), (0,)), ((), ()))
    kernel = jnp.ones((1, 1, 3, 3))
    image = jnp.ones((1, 1, 4, 4))
    return {
        "dot_general": lambda w: lax.dot_general(X, w, contraction, preferred_element_type=preferred),
        "dot": lambda w: lax.dot(X, w, preferred_element_type=preferred),
        "conv": lambda w: lax.conv_general_dilated(
            image * w[0, 0], kernel, (1, 1), "SAME", preferred_element_type=preferred
        ),
        "vmap": lambda w: jax.vmap(lambda x: lax.dot(x, w, preferred_element_type=preferred))(X),
        "jit": lambda w: jax.jit(lambda w: lax.dot(X, w, preferred_element_type=preferred))(w),
    }


@pytest.mark.parametrize("name", products(None))
def test_a_float32_output_that_was_asked_for_is_float32(name: str) -> None:
    text = str(jax.make_jaxpr(polyamp.autocast(products(jnp.float32)[name], "mixed_bfloat16"))(W))
    assert text.count("preferred_element_type=float32") == 1
    assert "new_dtype=bfloat16" in text  # its operands are in 16 bits
    loss = lambda w: jnp.square(products(jnp.float32)[name](w)).sum()  # noqa: E731
    np.testing.assert_allclose(jax.grad(polyamp.autocast(loss, "mixed_bfloat16"))(W), jax.grad(loss)(W), rtol=2e-2)


@pytest.mark.parametrize("fn", [jnp.matmul, lambda x, w: jnp.einsum("bi,ij->bj", x, w), jnp.dot, lambda x, w: x @ w])
def test_what_jax_numpy_asks_for_by_itself_is_no_wish(fn: Any) -> None:
    batched = jax.vmap(fn), (X[None], W[None])
    for program, args in ((fn, (X, W)), (jax.grad(lambda x, w: fn(x, w).sum(), 1), (X, W)), batched):
        text = str(jax.make_jaxpr(polyamp.autocast(program, "mixed_float16"))(*args))
        assert "preferred_element_type=float16" in text
        assert "preferred_element_type=float32" not in text
