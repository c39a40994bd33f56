"""`polyamp.mismatch` in every framework: one planted operation makes the difference, and is found."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import polyamp

ROWS, WIDTH, WORDS = 64, 32, 8
RNG = np.random.default_rng(0)
X = RNG.standard_normal((ROWS, WIDTH)).astype(np.float32)
BODY = (RNG.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32)
HEAD = (RNG.standard_normal((WIDTH, WORDS)) / WIDTH**0.5).astype(np.float32)
FAR = 64.0
"""The training program adds this to its logits, where 16 bits have few fractional digits, and subtracts it again."""

Program = Callable[..., Any]


def in_torch() -> tuple[Program, Program, tuple[Any, ...]]:
    import torch

    class Layer(torch.nn.Module):
        def __init__(self, weight: np.ndarray) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor(weight))

        def forward(self, x: Any, far: float) -> Any:
            y = x @ self.weight
            return y + far if far else y

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = Layer(BODY), Layer(HEAD)

        def forward(self, x: Any, far: float) -> Any:
            return torch.log_softmax((self.head(torch.relu(self.body(x, 0.0)), far) - far).float(), -1)[:, 0]

    model = Model()
    return lambda x: model(x, FAR), lambda x: model(x, 0.0), (torch.tensor(X),)


def in_jax() -> tuple[Program, Program, tuple[Any, ...]]:
    import jax
    import jax.numpy as jnp

    def log_probs(params: Any, x: Any, far: float) -> Any:
        with jax.named_scope("body"):
            x = jax.nn.relu(x @ params["body"])
        with jax.named_scope("head"):
            x = x @ params["head"]
            x = x + far if far else x
        return jax.nn.log_softmax((x - far).astype(jnp.float32))[:, 0]

    params = {"body": jnp.asarray(BODY), "head": jnp.asarray(HEAD)}
    return lambda p, x: log_probs(p, x, FAR), jax.jit(lambda p, x: log_probs(p, x, 0.0)), (params, jnp.asarray(X))


def in_tensorflow() -> tuple[Program, Program, tuple[Any, ...]]:
    import tensorflow as tf

    body, head = tf.Variable(BODY), tf.Variable(HEAD)

    def log_probs(x: Any, far: float) -> Any:
        with tf.name_scope("body"):
            x = tf.nn.relu(x @ body)
        with tf.name_scope("head"):
            x = x @ head
            x = x + far if far else x
        return tf.nn.log_softmax(tf.cast(x - far, tf.float32))[:, 0]

    @tf.function
    def infer(x: Any) -> Any:
        return log_probs(x, 0.0)

    def train(x: Any) -> Any:
        return log_probs(x, FAR)

    return train, infer, (tf.constant(X),)


@pytest.mark.parametrize("programs", [in_torch, in_jax, in_tensorflow], ids=lambda fn: fn.__name__)
def test_the_planted_operation_is_the_cause(programs: Callable[..., Any]) -> None:
    train, infer, args = programs()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # trial runs warn of nothing
        report = polyamp.mismatch(train, infer, *args)
    means = {one.name: one.differences.mean for one in report.comparisons}
    assert means["float32"] < 1e-4
    assert 4 < means["mixed_bfloat16"] / means["mixed_float16"] < 16  # three bits of mantissa
    for name in ("mixed_bfloat16", "mixed_float16"):
        causes = {one.rule: one for one in report[name].causes}
        planted = causes["head/add"]
        assert planted.programs == "train"
        assert planted.share > 0.8
        assert causes["body/matmul"].programs == "both"
        assert causes["body/matmul"].share < 0.4
