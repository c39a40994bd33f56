"""The derivatives of functions of a 16-bit value, over most of float16's range, at the best of several loss scales."""

from __future__ import annotations

import functools
import itertools
import math
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

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "rsqrt": lambda F, a, b: 1 / F.sqrt(a),
    "sqrt": lambda F, a, b: F.sqrt(a),
    "1 / a": lambda F, a, b: 1 / a,
    "a**-2": lambda F, a, b: a**-2,
    "a**0.3": lambda F, a, b: a**0.3,
    "log": lambda F, a, b: F.log(a),
    "log1p": lambda F, a, b: F.log1p(a),
    "tan": lambda F, a, b: F.tan(a),
    "atan": lambda F, a, b: F.atan(a),
    "asinh": lambda F, a, b: F.asinh(a),
    "1 / maximum": lambda F, a, b: 1 / (F.maximum(a, 0 * a) + 1e-5),
    "1 / maximum of 0": lambda F, a, b: 1 / (F.maximum(-a, 0 * a) + 1e-5),
    "a / b": lambda F, a, b: a / b,
    "log(1 + a / b)": lambda F, a, b: F.log(1 + a / b),
    "a * (1 / b)": lambda F, a, b: a * (1 / b),
    "atan2": lambda F, a, b: F.atan2(a, b),
}
COUNT = 64
SCALES = np.exp2(np.arange(-32.0, 33.0, 8.0))
SHAPE = len(SCALES), COUNT  # each row has a loss scale of its own


def jax_loss(name: str, params: Any, x: Any, factor: Any) -> Any:
    value = FUNCTIONS[name](jnp, *((x @ own).reshape(SHAPE) for own in params))
    return (value * factor).sum(), value


class Torch(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.params = torch.nn.ParameterList(torch.ones(1, math.prod(SHAPE)) for _ in range(2))

    def forward(self, x: torch.Tensor, factor: torch.Tensor) -> Any:
        value = FUNCTIONS[self.name](torch, *((x @ own).reshape(SHAPE) for own in self.params))
        return (value * factor).sum(), value


@functools.cache
def by_jax(name: str) -> Callable[..., Any]:
    step = jax.jit(jax.grad(polyamp.autocast(functools.partial(jax_loss, name), "mixed_float16"), has_aux=True))
    return lambda operands, factor: step(operands, jnp.ones((1, 1)), factor)


@functools.cache
def by_torch(name: str) -> Callable[..., Any]:
    x, factor = torch.ones(1, 1), torch.ones(SHAPE)
    model = polyamp.rewrite(Torch(name), x, factor, policy="mixed_float16")

    def step(operands: Any, factor: Any) -> Any:
        params = list(model.parameters())
        with torch.no_grad():
            for param, operand in zip(params, operands, strict=True):
                param.copy_(torch.from_numpy(operand))
        loss, value = model(x, torch.from_numpy(factor))
        return torch.autograd.grad(loss, params, materialize_grads=True), value.detach()

    return step


@functools.cache
def by_tensorflow(name: str) -> Callable[..., Any]:
    variables = [tf.Variable(tf.ones((1, math.prod(SHAPE)))) for _ in range(2)]

    def program(x: Any, factor: Any) -> Any:
        with tf.GradientTape() as tape:
            value = FUNCTIONS[name](tf.math, *(tf.reshape(x @ own, SHAPE) for own in variables))
            loss = tf.reduce_sum(value * factor)
        return tape.gradient(loss, variables, unconnected_gradients="zero"), value

    rewritten = polyamp.rewrite(program, policy="mixed_float16")

    def step(operands: Any, factor: Any) -> Any:
        for variable, operand in zip(variables, operands, strict=True):
            variable.assign(operand)
        return rewritten(tf.ones((1, 1)), tf.constant(factor))

    return step


def relative(found: Any, wanted: Any, least: float) -> Any:
    own, like = (np.asarray(one, np.float64).reshape(SHAPE) for one in (found, wanted))
    error = np.abs(own - like) / (np.abs(like) + least)
    return np.where(np.isfinite(error), error, np.inf)


BY_TORCH = pytest.mark.xfail(strict=True, reason="PyTorch differentiates a / b by (a / b) / b, which overflows")
CASES = [
    pytest.param(by, name, marks=BY_TORCH if by is by_torch and "a / b" in name else ())
    for by, name in itertools.product((by_jax, by_torch, by_tensorflow), FUNCTIONS)
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("framework", "name"), CASES)
@settings(max_examples=5)
@given(seed=st.integers(0, 2**32 - 1))
def test_some_loss_scale_makes_each_derivative_right(
    framework: Callable[[str], Callable[..., Any]], name: str, seed: int
) -> None:
    random = np.random.default_rng(seed)
    first = random.uniform(-12, 14, COUNT)
    second = np.clip(first + random.uniform(-8, 8, COUNT), -12, 14)
    rounded = (np.exp2(one).astype(np.float16).astype(np.float32) for one in (first, second))
    operands = [np.tile(one, (1, len(SCALES))) for one in rounded]
    factor = np.broadcast_to(SCALES[:, None], SHAPE)
    with jax.enable_x64(True):
        wide = [np.float64(one) for one in operands]
        wanted, value = jax.grad(functools.partial(jax_loss, name), has_aux=True)(wide, np.ones((1, 1)), np.ones(SHAPE))
    found, result = framework(name)(operands, np.float32(factor))
    for own, like in zip(found, wanted, strict=True):
        error = relative(np.asarray(own, np.float64).reshape(SHAPE) / factor, like, 1e-6)
        assert np.max(np.min(error, axis=0)) < 0.01
    assert np.max(relative(result, value, 0.1)) < 0.01
