"""Training on real digits from the same weights and batches has the same losses in every framework."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polyamp import LossScale, policy
from polyamp.demo import examples

STEPS = 100
pytestmark = pytest.mark.slow

POLICIES = {
    "float32": policy("float32"),
    "mixed_bfloat16": policy("mixed_bfloat16"),
    # A scale that grows and does not overflow: a skipped step would shift the run against the others by one batch.
    "mixed_float16": policy("mixed_float16", loss_scale=LossScale(init=2.0**10, interval=20)),
}

# The largest distance of one step's loss from float32's, relative to that loss or to 0.1 nats if it is smaller. One
# product is rounded by 2**-11 in float16 and 2**-8 in bfloat16; 100 steps of training carry that along.
TOLERANCE = {"float32": 1e-3, "mixed_float16": 4e-2, "mixed_bfloat16": 8e-2}


class Trace:
    """The losses and what else an example reports of one training."""

    def __init__(self, example: Any, name: str) -> None:
        self.losses: list[float] = []
        self.numbers = example.train(POLICIES[name], STEPS, lambda loss, step: self.losses.append(loss))


@pytest.fixture(scope="module")
def done() -> dict[str, dict[str, Trace]]:
    """Return the trace of each framework, by policy."""
    found, absent = examples()
    assert absent == []
    with pytest.MonkeyPatch.context() as patch:
        for example in found.values():
            patch.setattr(example, "RATE", 0.02)
        return {name: {adapter.name: Trace(example, name) for adapter, example in found.items()} for name in POLICIES}


def distance(losses: list[float], reference: list[float]) -> float:
    return float(np.max(np.abs(np.subtract(losses, reference)) / np.maximum(np.abs(reference), 0.1)))


@pytest.mark.parametrize("name", POLICIES)
def test_losses_agree_with_float32_in_every_framework(done: dict[str, dict[str, Trace]], name: str) -> None:
    assert done[name].keys() == {"torch", "jax", "keras", "tensorflow"}
    reference = done["float32"]["torch"].losses
    distances = {framework: distance(trace.losses, reference) for framework, trace in done[name].items()}
    assert max(distances.values()) <= TOLERANCE[name], distances
    assert min(trace.numbers["accuracy"] for trace in done[name].values()) > 0.8


@pytest.mark.parametrize("name", POLICIES)
def test_mixed_precision_stores_float32_parameters_and_half_the_activations(
    done: dict[str, dict[str, Trace]], name: str
) -> None:
    for framework, trace in done[name].items():
        assert trace.numbers["parameter_bytes"] == 4 * 6090, framework
        scores = 64 * 10  # of which Keras makes float32 numbers
        others = 64 * (2 * 8 * 8 * 16 + 4 * 4 * 16 + 2 * 4 * 4 * 32 + 2 * 2 * 32)
        size = 4 if name == "float32" else 2
        assert trace.numbers["activation_bytes"] - size * others in (size * scores, 4 * scores), framework
