"""Policies, dtypes and formats of real libraries, as polyamp's, and polyamp's in place of theirs."""

from typing import Any

import haiku
import jax
import jax.numpy as jnp
import jmp
import keras
import ml_dtypes
import pytest
import tensorflow as tf
import torch

import polyamp
from polyamp import policy
from polyamp.formats import FORMATS


@pytest.mark.parametrize(
    "text", ["p=f32,c=bf16,o=f32", "params=float16,compute=float16,output=float32", "half", "full"]
)
def test_a_jmp_policy_is_a_policy(text: str) -> None:
    assert policy(jmp.get_policy(text)) == policy(text)


@pytest.mark.parametrize("name", ["float32", "mixed_float16", "mixed_bfloat16", "float16", "bfloat16"])
def test_a_keras_policy_is_a_policy(name: str) -> None:
    assert policy(keras.DTypePolicy(name)) == policy(name)


DTYPES: list[Any] = [torch.bfloat16, jnp.bfloat16, jnp.dtype(jnp.bfloat16), tf.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=repr)
def test_a_dtype_is_a_format_and_could_be_two_policies(dtype: Any) -> None:
    for call in (policy, polyamp.autocast):
        with pytest.raises(polyamp.errors.InvalidValueError, match=r'"mixed_bfloat16", which .*; "bfloat16", which'):
            call(dtype)
    assert policy(param="float32", compute=dtype, output="float32") == policy("mixed_bfloat16")


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, jnp.int8, tf.string, tf.bool], ids=repr)
def test_what_is_no_floating_dtype_is_refused(dtype: Any) -> None:
    with pytest.raises(polyamp.errors.InvalidTypeError):
        policy(dtype)
    with pytest.raises(polyamp.errors.InvalidTypeError):
        policy(compute=dtype)


def test_haiku_takes_our_policy() -> None:
    ours = policy("mixed_bfloat16", output="bfloat16")
    assert (ours.param_dtype, ours.compute_dtype, ours.output_dtype) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)
    try:
        haiku.mixed_precision.set_policy(haiku.Linear, ours)  # type: ignore[arg-type]
        net = haiku.transform(lambda x: haiku.Linear(3)(x))
        params = net.init(jax.random.key(0), jnp.ones((2, 4)))
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
        assert net.apply(params, None, jnp.ones((2, 4))).dtype == jnp.bfloat16
    finally:
        haiku.mixed_precision.clear_policy(haiku.Linear)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_limits_are_those_of_ml_dtypes(name: str) -> None:
    ours, theirs = FORMATS[name], ml_dtypes.finfo(name)
    assert (ours.bits, ours.max, ours.epsilon) == (theirs.bits, float(theirs.max), float(theirs.eps))
    assert ours.smallest_normal == float(theirs.smallest_normal)
    assert ours.smallest_subnormal == float(theirs.smallest_subnormal)
