"""Random programs in the words of the traps: parameters, inputs, products, norms, guards and their combinations."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf
import torch

from support.traps.words import Jax, TensorFlow, Torch

Step = Callable[[Any, Any, Any], Any]  # takes the words and two values of one shape


class InTorch(Torch):
    """The words of PyTorch, with some as one operation, as in the other frameworks."""

    reciprocal = torch.reciprocal

    @staticmethod
    def maximum(x: Any, least: float) -> Any:
        return torch.maximum(x, torch.tensor(least))


class InJax(Jax):
    maximum = jnp.maximum

    @staticmethod
    def reciprocal(x: Any) -> Any:
        return 1.0 / x


class InTensorFlow(TensorFlow):
    maximum = tf.maximum

    @staticmethod
    def reciprocal(x: Any) -> Any:
        return 1.0 / x


def _centred(ops: Any, a: Any, _: Any) -> Any:
    return a - ops.sum(a, -1) * 0.0625


def _rooted(ops: Any, a: Any, _: Any) -> Any:
    return a * ops.rsqrt(ops.sum(ops.square(a), -1) * 0.0625 + 1e-6)


def _normal(ops: Any, a: Any, b: Any) -> Any:
    centred = _centred(ops, a, b)
    return _rooted(ops, centred, b) * ops.tanh(b) + 0.5


def _softmax(ops: Any, a: Any, _: Any) -> Any:
    e = ops.exp(-ops.abs(a))
    return e / ops.sum(e, -1)


STEPS: tuple[Step, ...] = (
    lambda ops, a, b: a + b,
    lambda ops, a, b: a - b,
    lambda ops, a, b: a * b,
    lambda ops, a, b: a / (ops.abs(b) + 1.0),
    lambda ops, a, b: ops.where(ops.gate, a, b),
    lambda ops, a, b: a * ops.sigmoid(b),
    lambda ops, a, b: a * a + b,
    lambda ops, a, b: ops.abs(a) + 2.0,
    lambda ops, a, b: ops.relu(a),
    lambda ops, a, b: ops.tanh(a),
    lambda ops, a, b: ops.sigmoid(a),
    lambda ops, a, b: -a,
    lambda ops, a, b: a * 0.5,
    lambda ops, a, b: a + 1e-8,
    lambda ops, a, b: a * 1e5,
    lambda ops, a, b: ops.maximum(a, 1e-12),
    lambda ops, a, b: 0.9999999 - ops.sigmoid(a),
    lambda ops, a, b: ops.log(ops.sigmoid(a) + 1e-12),
    lambda ops, a, b: ops.log(ops.abs(a) + 1.0),
    lambda ops, a, b: ops.log1p(ops.abs(a)),
    lambda ops, a, b: ops.exp(-ops.abs(a)),
    lambda ops, a, b: ops.expm1(-ops.abs(a)),
    lambda ops, a, b: ops.sin(a),
    lambda ops, a, b: ops.sqrt(ops.abs(a)),
    lambda ops, a, b: ops.square(a),
    lambda ops, a, b: ops.reciprocal(ops.abs(a) + 1.0),
    lambda ops, a, b: ops.sum(a, -1) + b,
    _centred,
    _rooted,
    _normal,
    _softmax,
)
GATE = np.arange(16) % 3 > 0


def program(seed: int) -> Callable[..., Any]:
    """Return a program of 4 to 10 steps, two or more of which are products, as ``program(ops, w, x, z)``."""
    rng = random.Random(seed)
    plan = []  # computed before, since Dynamo traces NumPy
    for known in range(4, 4 + rng.randint(4, 10)):
        step = None if rng.random() < 0.3 else rng.choice(STEPS)
        plan.append((step, known - 1 - rng.randrange(3), rng.randrange(known)))

    def run(ops: Any, w: Any, x: Any, z: Any) -> Any:
        known = [x, z, w, ops.matmul(x, w)]
        for step, first, second in plan:
            a, b = known[first], known[second]
            known.append(ops.matmul(a, w) if step is None else step(ops, a, b))
        return ops.matmul(known[-1], w) + known[-2]

    return run


W = (np.eye(16) * 0.5).astype(np.float32)
X, Z = (np.random.default_rng(seed).standard_normal((16, 16)).astype(np.float32) for seed in (0, 1))


class Module(torch.nn.Module):
    """A program with its parameter, as a module."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run, self.w = run, torch.nn.Parameter(torch.tensor(W))

    def forward(self, x: Any, z: Any) -> Any:
        return self.run(InTorch, self.w, x, z)


InTorch.gate, InJax.gate, InTensorFlow.gate = torch.tensor(GATE), jnp.asarray(GATE), tf.constant(GATE)


def in_jax(run: Callable[..., Any]) -> tuple[Any, ...]:
    """Return a function of JAX and its arguments, parameters first."""
    return lambda w, x, z: run(InJax, w, x, z), *map(jax.numpy.asarray, (W, X, Z))


def in_tensorflow(run: Callable[..., Any]) -> tuple[Any, ...]:
    """Return a function of TensorFlow that reads its parameter once, as the others do, and its arguments."""
    w = tf.Variable(W)
    return lambda x, z: run(InTensorFlow, tf.identity(w), x, z), tf.constant(X), tf.constant(Z)


def in_torch(run: Callable[..., Any]) -> tuple[Any, ...]:
    """Return a module and its arguments."""
    return Module(run), torch.tensor(X), torch.tensor(Z)
