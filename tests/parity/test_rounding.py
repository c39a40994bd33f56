"""Values that 16 bits change although nothing overflows: found, located and cured in every framework."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch

import polyamp

pytestmark = pytest.mark.slow

RANDOM = np.random.default_rng(0)
X = np.abs(RANDOM.standard_normal((32, 8))).astype("float32")
NEARLY_CONSTANT = (0.5 + 1e-5 * RANDOM.standard_normal((8, 16))).astype("float32")
HEAD = RANDOM.standard_normal((16, 4)).astype("float32")


class Torch(torch.nn.Module):
    def __init__(self, first: np.ndarray) -> None:
        super().__init__()
        self.first, self.head = (torch.nn.Parameter(torch.from_numpy(each)) for each in (first, HEAD))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x @ self.first
        centred = h - h.mean(-1, keepdim=True)
        z = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-12)
        return (z @ self.head).square().mean()


def jax_step(params: Any, x: Any) -> Any:
    h = x @ params["first"]
    centred = h - h.mean(-1, keepdims=True)
    z = centred / jnp.sqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-12)
    return jnp.square(z @ params["head"]).mean()


def tensorflow_step(first: np.ndarray) -> Any:
    weights, head = tf.Variable(first), tf.Variable(HEAD)

    def step(x: Any) -> Any:
        h = x @ weights
        centred = h - tf.reduce_mean(h, -1, keepdims=True)
        z = centred / tf.sqrt(tf.reduce_mean(tf.square(centred), -1, keepdims=True) + 1e-12)
        return tf.reduce_mean(tf.square(z @ head))

    return step


def step_of(framework: str, first: np.ndarray) -> tuple[Any, ...]:
    if framework == "torch":
        return Torch(first), torch.from_numpy(X)
    if framework == "jax":
        return jax_step, {"first": jnp.array(first), "head": jnp.array(HEAD)}, jnp.array(X)
    return tensorflow_step(first), tf.constant(X)


FRAMEWORKS = ["torch", "jax", "tensorflow"]
ORDINARY = RANDOM.standard_normal((8, 16)).astype("float32")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_place_and_a_rule_that_cures_are_found(framework: str) -> None:
    step, *args = step_of(framework, NEARLY_CONSTANT)
    verdict = polyamp.diagnose(step, *args, policy="mixed_float16")
    assert verdict.kind == "rounding"
    assert "ROUNDING" in str(verdict)
    assert verdict.rounding is not None
    assert verdict.rounding.first.name in ("sub", "matmul", "mean", "sum")
    assert verdict.is_cured
    assert verdict.as_dict()["rounding"]["loss_float32"] == pytest.approx(verdict.rounding.loss_float32)
    probe = polyamp.probe(step, *args, policy="mixed_float16")
    assert not probe.is_safe
    assert "Rounding to float16 changes the step" in str(probe)
    calibration = polyamp.calibrate(step, [tuple(args)], "mixed_float16")
    assert "ROUNDING" in calibration.rows()[1][1]
    assert [one.rounding for one in calibration.after] == [None]


@pytest.mark.parametrize(
    ("framework", "name"),
    [("torch", "mixed_bfloat16"), *((framework, "mixed_float16") for framework in FRAMEWORKS)],
)
def test_an_ordinary_step_is_left_alone(framework: str, name: str) -> None:
    step, *args = step_of(framework, ORDINARY)
    assert polyamp.diagnose(step, *args, policy=name).kind in ("finite", "scale")
    assert polyamp.probe(step, *args, policy=name).rounding is None
    assert not polyamp.calibrate(step, [tuple(args)], name).rules
