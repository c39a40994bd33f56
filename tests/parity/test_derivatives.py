"""The derivatives of functions of 16-bit values over most of float16's range: right at one loss scale or another."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import polyamp

pytestmark = pytest.mark.slow

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "1 / sqrt": lambda F, a, b: 1 / F.sqrt(a),
    "1 / a": lambda F, a, b: 1 / a,
    "a**-2": lambda F, a, b: a**-2,
    "log": lambda F, a, b: F.log(a),
    "tan": lambda F, a, b: F.tan(a),
    "atan": lambda F, a, b: F.atan(a),
    "asinh": lambda F, a, b: F.asinh(a),
    "1 / maximum": lambda F, a, b: 1 / (F.maximum(-a, 0 * a) + 1e-5),
    "a / b": lambda F, a, b: a / b,
    "log(1 + a / b)": lambda F, a, b: F.log(1 + a / b),
    "atan2": lambda F, a, b: F.atan2(a, b),
}
SCALES = np.exp2(np.arange(-32.0, 33.0, 8.0))[:, None]  # each row of the operands has a loss scale of its own
SHAPE = SCALES.size, 64
HALVES = np.full((1, 2), 0.5, np.float32)  # a product that sums one element would not be lowered


def jax_loss(params: Any, name: str, scales: Any) -> Any:
    return (
        FUNCTIONS[name](jnp, *(HALVES @ jnp.concatenate([own, own]) for own in params)).reshape(SHAPE) * scales
    ).sum()


def by_jax(name: str, operands: Any) -> Any:
    return jax.grad(lambda params: polyamp.autocast(jax_loss, "mixed_float16")(params, name, np.float32(SCALES)))(
        operands
    )


class Torch(torch.nn.Module):
    def __init__(self, name: str, operands: Any) -> None:
        super().__init__()
        self.name, self.params = name, torch.nn.ParameterList(torch.from_numpy(own) for own in operands)

    def forward(self, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return (
            FUNCTIONS[self.name](torch, *(x @ torch.cat([own, own]) for own in self.params)).reshape(SHAPE) * scales
        ).sum()


def by_torch(name: str, operands: Any) -> Any:
    args = torch.from_numpy(HALVES), torch.from_numpy(np.float32(SCALES))
    model = polyamp.rewrite(Torch(name, operands), *args, policy="mixed_float16")
    return torch.autograd.grad(model(*args), list(model.parameters()), materialize_grads=True)


def by_tensorflow(name: str, operands: Any) -> Any:
    def step(variables: Any, x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(variables)
            value = tf.reshape(FUNCTIONS[name](tf.math, *(x @ tf.concat([own, own], 0) for own in variables)), SHAPE)
            loss = tf.reduce_sum(value * np.float32(SCALES))
        return tape.gradient(loss, variables, unconnected_gradients="zero")

    return polyamp.rewrite(step, policy="mixed_float16")([tf.constant(own) for own in operands], tf.constant(HALVES))


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:.*changed nothing")  # products of a quotient are float32
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("by", [by_jax, by_torch, by_tensorflow])
def test_some_loss_scale_makes_each_derivative_right(by: Any, name: str) -> None:
    @settings(max_examples=3)
    @given(seed=st.integers(0, 2**32 - 1))
    def check(seed: int) -> None:
        random = np.random.default_rng(seed)
        first = random.uniform(-12, 14, SHAPE[1])
        second = np.clip(first + random.uniform(-8, 8, SHAPE[1]), -12, 14)
        operands = [np.tile(np.float32(np.float16(np.exp2(own))), (1, SCALES.size)) for own in (first, second)]
        with jax.enable_x64(True):
            wanted = [np.asarray(own) for own in jax.grad(jax_loss)(list(map(np.float64, operands)), name, 1.0)]
        for own, like in zip(by(name, operands), wanted, strict=True):
            error = np.abs(np.float64(own).reshape(SHAPE) / SCALES - like.reshape(SHAPE))
            relative = np.nan_to_num(error / (np.abs(like.reshape(SHAPE)) + 1e-6), nan=np.inf)
            assert relative.min(axis=0).max() < 0.01

    check()
