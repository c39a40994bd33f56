"""The same weights and batch have the same report in all frameworks, and the same fault has the same verdict."""

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

import polyamp
from polyamp.diagnosis.probe import Probe
from polyamp.diagnosis.recording import PARAMETER, Observation

RNG = np.random.default_rng(7)
SIZES = (24, 48, 32, 10)
WEIGHTS = [
    (RNG.standard_normal((rows, columns)) / rows**0.5).astype(np.float32) for rows, columns in itertools.pairwise(SIZES)
]
X = RNG.standard_normal((64, SIZES[0])).astype(np.float32)
Y = RNG.integers(0, SIZES[-1], 64)
ONE_HOT = np.eye(SIZES[-1], dtype=np.float32)[Y]

# The factor of the second layer's output in the forward pass (divided out again after its relu), the factor of its
# gradient in the backward pass, and the loss scale.
FAULTS = {
    "none": (1.0, 1.0, 2.0**12, "finite"),
    "scale": (1.0, 1.0, 2.0**30, "scale"),
    "layer": (1.0, 1e7, 2.0**12, "layer"),
    "forward": (3e4, 1.0, 2.0**12, "forward"),
}


@jax.custom_vjp
def _jax_amplify(value, factor):
    return value


_jax_amplify.defvjp(lambda value, factor: (value, factor), lambda factor, gradient: (gradient * factor, None))


def with_jax(forward: float, backward: float) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss_fn(weights):
        first, second, third = weights
        hidden = jax.nn.relu(jnp.asarray(X) @ first)
        with jax.named_scope("middle"):
            hidden = _jax_amplify(hidden @ second * forward, jnp.float32(backward))
        logits = jax.nn.relu(hidden) / forward @ third
        return -(jax.nn.log_softmax(logits) * ONE_HOT).sum(-1).mean()

    return loss_fn, ([jnp.asarray(weight) for weight in WEIGHTS],)


class _TorchAmplify(torch.autograd.Function):
    @staticmethod
    def forward(context, value, factor):
        context.factor = factor
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * context.factor, None


def with_torch(forward: float, backward: float) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    weights = [torch.nn.Parameter(torch.from_numpy(weight)) for weight in WEIGHTS]

    class Middle(torch.nn.Module):
        def forward(self, hidden):
            return _TorchAmplify.apply(hidden @ weights[1] * forward, backward)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weights, self.middle = torch.nn.ParameterList(weights), Middle()

        def forward(self, x):
            hidden = self.middle(torch.relu(x @ weights[0]))
            return torch.relu(hidden) / forward @ weights[2]

    net = Net()
    return lambda x, y: torch.nn.functional.cross_entropy(net(x), y), (torch.from_numpy(X), torch.from_numpy(Y))


def with_tensorflow(forward: float, backward: float) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    weights = [tf.Variable(weight, name=f"weight{place}") for place, weight in enumerate(WEIGHTS)]

    @tf.custom_gradient
    def amplify(value):
        return tf.identity(value), lambda gradient: gradient * backward

    def loss_fn(x, y):
        hidden = tf.nn.relu(x @ weights[0])
        with tf.name_scope("middle"):
            hidden = amplify(hidden @ weights[1] * forward)
        logits = tf.nn.relu(hidden) / forward @ weights[2]
        return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(y, logits))

    return loss_fn, (tf.constant(X), tf.constant(ONE_HOT))


FRAMEWORKS = {"jax": with_jax, "torch": with_torch, "tensorflow": with_tensorflow}


@pytest.fixture(scope="module")
def probes() -> dict[str, Probe]:
    made = {name: make(1.0, 1.0) for name, make in FRAMEWORKS.items()}
    return {name: polyamp.probe(step, *args, policy="mixed_float16") for name, (step, args) in made.items()}


@pytest.fixture(params=["jax", "tensorflow"])
def other(request, probes) -> Probe:
    return probes[request.param]


def same(one: Observation, two: Observation) -> None:
    """Assert equal numbers, except where another order of summation rounds to the other side of a power of two."""
    assert one.shape == two.shape
    assert one.format == two.format
    assert one.spread.largest == pytest.approx(two.spread.largest, rel=1e-4)
    assert one.spread.mass == pytest.approx(two.spread.mass, rel=1e-3, abs=2e-2 * sum(one.spread.mass))
    off = sum(abs(a - b) for a, b in zip(one.spread.counts, two.spread.counts, strict=True))
    assert off <= 0.01 * one.spread.elements


def test_the_window_and_the_recommendation_are_the_same(probes, other) -> None:
    assert other.window == probes["torch"].window
    assert other.recommended == probes["torch"].recommended
    assert other.recording.loss == pytest.approx(probes["torch"].recording.loss, rel=1e-5)


def test_the_parameters_gradients_are_the_same(probes, other) -> None:
    here, there = (list(probe.recording.of_kind(PARAMETER)) for probe in (probes["torch"], other))
    assert len(here) == len(there) == len(WEIGHTS)
    for one, two in zip(here, there, strict=True):
        same(one, two)
        assert probes["torch"].need(one) == other.need(two)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_verdict_on_a_fault_is_the_same(framework: str, fault: str) -> None:
    forward, backward, scale, kind = FAULTS[fault]
    step, args = FRAMEWORKS[framework](forward, backward)
    verdict = polyamp.diagnose(step, *args, policy="mixed_float16", scale=scale)
    assert verdict.kind == kind
    if kind in ("layer", "forward"):
        assert "middle" in " ".join(verdict.rules)
        assert math.isfinite(verdict.probe.recording.loss)


def _masked(framework: str, factor: float) -> tuple[Any, tuple[Any, ...]]:
    """Attention whose mask is -inf; the factor makes its logits large."""
    rng = np.random.default_rng(0)
    x, q, k = (np.float32(rng.standard_normal(shape)) for shape in ((8, 16), (16, 16), (16, 16)))
    mask = np.tril(np.ones((8, 8), bool))
    if framework == "jax":

        def with_mask(q: Any, x: Any) -> Any:
            logits = jnp.where(mask, (x @ q) @ (x @ k).T, -jnp.inf)
            return jnp.square(jax.nn.softmax(logits) @ x).mean()

        return with_mask, (q * factor, x)
    weight = torch.nn.Parameter(torch.tensor(q * factor))

    def masked(x: Any) -> Any:
        logits = ((x @ weight) @ (x @ torch.tensor(k)).T).masked_fill(~torch.tensor(mask), -math.inf)
        return (torch.exp(logits - logits.amax(-1, keepdim=True)).softmax(-1) @ x).square().mean()

    return masked, (torch.tensor(x),)


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_minus_infinity_is_a_legal_value(framework: str) -> None:
    step, args = _masked(framework, 1.0)
    assert polyamp.probe(step, *args, policy="mixed_float16").broken is None
    assert polyamp.diagnose(step, *args, policy="mixed_float16", scale=1.0).kind == "finite"
    step, args = _masked(framework, 3e3)
    assert polyamp.diagnose(step, *args, policy="mixed_float16").kind == "forward"
    found = polyamp.calibrate(step, [args], "mixed_float16")
    assert found.rules
    assert [one.kind for one in found.after] == ["finite"]
