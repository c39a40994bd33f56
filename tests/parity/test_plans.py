"""One flow rule: the same arithmetic in JAX, TensorFlow and PyTorch has the same plan."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch

import polyamp
from polyamp.backends.jax import explain as explain_jax
from polyamp.backends.tensorflow import explain as explain_tensorflow
from polyamp.backends.torch import explain as explain_torch
from support.traps.words import Jax, TensorFlow, Torch

MOVING = {"broadcast", "reshape", "identity", "constant", "variable", "cast", "fill"}  # each framework has its own
X, W = np.full((4, 8), 0.25, np.float32), np.full((8, 8), 0.5, np.float32)


# The words of the traps, whose `where` and `at_least` take Python numbers as one operation.
InTorch = SimpleNamespace(**vars(Torch) | {"at_least": lambda x, least: torch.maximum(x, torch.tensor(least))})


def concat(ops: Any, one: Any, other: Any) -> Any:
    if ops is InTorch:
        return torch.cat([one, other], 1)
    return tf.concat([one, other], 1) if ops is TensorFlow else jnp.concatenate([one, other], 1)


def norm(ops: Any, x: Any) -> Any:
    return x * ops.rsqrt(ops.sum(ops.square(x), -1) + 1e-6)


PROGRAMS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "layer": lambda ops, x, w: ops.tanh(x @ w + x),
    "declared": lambda ops, x, w: ops.tanh(x * x) + x,
    "softmax by hand": lambda ops, x, w: (lambda e: e / ops.sum(e, -1))(ops.exp(x @ w)),
    "norm, then product": lambda ops, x, w: norm(ops, x @ w) @ w,
    "gate": lambda ops, x, w: ops.sigmoid(x @ w) * (x @ w) - x,
    "mask": lambda ops, x, w: ops.where(x > 0, x @ w, -3e38),
    "small constant": lambda ops, x, w: ops.at_least(x @ w, 1e-12),
    "mixed concat": lambda ops, x, w: concat(ops, x @ w, ops.exp(x)) * 2.0,
    "weak concat": lambda ops, x, w: concat(ops, x @ w, x) * 2.0,
    "two uses": lambda ops, x, w: (lambda y: ops.exp(y) + y @ w)(x @ w),
}


class Layer(torch.nn.Module):
    """A program whose weights are a parameter."""

    def __init__(self, run: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.run, self.w = run, torch.nn.Parameter(torch.tensor(W))

    def forward(self, x: Any) -> Any:
        return self.run(x, self.w)


def decided(plan: polyamp.Plan) -> list[tuple[str, str, str, str]]:
    kept = (op for op in plan.operations if op.name not in MOVING and op.format != "as written")
    return sorted((op.name, op.op_class, op.format, op.reason) for op in kept)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_operations_are_decided_alike(program: str, policy: str) -> None:
    run = PROGRAMS[program]
    in_jax = explain_jax(lambda w, x: run(Jax, x, w), W, X, policy=policy)  # the first argument is the parameters
    weights = tf.Variable(W)
    in_tensorflow = explain_tensorflow(
        lambda x: run(TensorFlow, x, tf.identity(weights)), tf.constant(X), policy=policy
    )
    in_torch = explain_torch(Layer(lambda x, w: run(InTorch, x, w)), torch.tensor(X), policy=policy)
    assert decided(in_jax) == decided(in_tensorflow) == decided(in_torch) != []


class Scope(torch.nn.Module):
    """A module in place of a named scope of the other frameworks."""

    def __init__(self, run: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, y: Any, w: Any) -> Any:
        y = self.run(y, w)
        return self.deeper(y, w) if hasattr(self, "deeper") else y


RULES = [
    {"matmul": "full"},
    {"exp": "lower"},
    {"head": "full"},
    {"add": "lower"},
    {"head/*": "full"},
    {"head/matmul": "full"},
    {"*/deeper/*": "full"},
]


@pytest.mark.parametrize("rules", RULES)
def test_rules_reach_the_same_operations(rules: dict[str, str]) -> None:
    policy = polyamp.policy("mixed_bfloat16", rules=rules)

    def run(ops: Any, scope: Any, x: Any, w: Any) -> Any:
        y = ops.exp(x @ w + x)
        with scope("head"):
            y = y @ w
            with scope("deeper"):
                return y @ w

    in_jax = explain_jax(lambda w, x: run(Jax, jax.named_scope, x, w), W, X, policy=policy)
    weights = tf.Variable(W)
    in_tensorflow = explain_tensorflow(
        lambda x: run(TensorFlow, tf.name_scope, x, tf.identity(weights)), tf.constant(X), policy=policy
    )

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.w = Scope(lambda y, w: y @ w), torch.nn.Parameter(torch.tensor(W))
            self.head.deeper = Scope(lambda y, w: y @ w)

        def forward(self, x: Any) -> Any:
            return self.head(torch.exp(x @ self.w + x), self.w)

    in_torch = explain_torch(Model(), torch.tensor(X), policy=policy)
    assert decided(in_jax) == decided(in_tensorflow) == decided(in_torch) != []


@pytest.mark.parametrize("name", ["half", "O3", "float16", "bfloat16", "16-true", "bf16-true"])
@pytest.mark.parametrize("rules", [{}, {"nowhere/*": "full"}], ids=["no rules", "one that matches nothing"])
def test_a_rule_that_matched_nothing_is_the_user_s_own(name: str, rules: dict[str, str]) -> None:
    policy = polyamp.policy(name, rules=rules)
    plans = [
        explain_jax(lambda x, w: x @ w, X, W, policy=policy),
        explain_tensorflow(lambda x, w: x @ w, tf.constant(X), tf.constant(W), policy=policy),
        explain_torch(lambda x, w: x @ w, torch.tensor(X), torch.tensor(W), policy=policy),
    ]
    assert [plan.unused_rules for plan in plans] == [tuple(rules)] * 3


@pytest.mark.parametrize(("adds_up", "reason"), [(True, "after a loop"), (False, "next to matmul")])
def test_what_follows_a_loop_is_said_in_the_same_words(adds_up: bool, reason: str) -> None:
    def turn(y: Any, w: Any) -> Any:
        return y + y @ w if adds_up else y @ w

    def in_jax(w: Any, x: Any) -> Any:
        return jnp.abs(jax.lax.fori_loop(0, 3, lambda _, y: turn(y, w), x @ w))

    weights = tf.Variable(W)

    def in_tensorflow(x: Any) -> Any:
        y = x @ weights
        for _ in tf.range(3):
            y = turn(y, weights)
        return tf.abs(y)

    plans = [
        explain_jax(in_jax, W, X, policy="mixed_bfloat16"),
        explain_tensorflow(in_tensorflow, tf.constant(X), policy="mixed_bfloat16"),
    ]
    reasons = [{op.reason for op in plan.operations if op.name == "abs"} for plan in plans]
    assert reasons == [{reason}] * 2
