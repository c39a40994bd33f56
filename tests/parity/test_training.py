"""Training on real digits from the same weights and batches has the same losses in every framework."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from polyamp import LossScale, policy
from polyamp.demo import Task, Trace, digits_task, trainers

STEPS = 100

POLICIES = {
    "float32": policy("float32"),
    "mixed_bfloat16": policy("mixed_bfloat16"),
    # A scale that grows and does not overflow: a skipped step would shift the run against the others by one batch.
    "mixed_float16": policy("mixed_float16", loss_scale=LossScale(init=2.0**12, interval=20)),
}

# The largest distance of one step's loss from float32's, relative to that loss or to 0.1 nats if it is smaller. One
# product is rounded by 2**-11 in float16 and 2**-8 in bfloat16; 100 steps of training carry that along.
TOLERANCE = {"float32": 1e-3, "mixed_float16": 4e-2, "mixed_bfloat16": 8e-2}


def task(steps: int = STEPS) -> Task:
    return replace(digits_task(steps), learning_rate=0.02)


@pytest.fixture(scope="module")
def done() -> dict[str, dict[str, Trace]]:
    """Return the trace of each framework, by policy."""
    adapters, absent = trainers()
    assert absent == []
    return {
        name: {adapter.name: adapter.train_digits(replace(task(), policy=chosen)) for adapter in adapters}
        for name, chosen in POLICIES.items()
    }


def distance(losses: list[float], reference: list[float]) -> float:
    return float(np.max(np.abs(np.subtract(losses, reference)) / np.maximum(np.abs(reference), 0.1)))


def test_every_framework_trained_under_every_policy(done: dict[str, dict[str, Trace]]) -> None:
    assert all(traces.keys() == {"torch", "jax", "keras"} for traces in done.values())


@pytest.mark.parametrize("name", POLICIES)
def test_losses_agree_with_float32_in_every_framework(done: dict[str, dict[str, Trace]], name: str) -> None:
    reference = done["float32"]["torch"].losses
    distances = {framework: distance(trace.losses, reference) for framework, trace in done[name].items()}
    assert max(distances.values()) <= TOLERANCE[name], distances


@pytest.mark.parametrize("name", POLICIES)
def test_training_learns_the_digits(done: dict[str, dict[str, Trace]], name: str) -> None:
    for framework, trace in done[name].items():
        assert trace.accuracy > 0.9, framework
        assert trace.losses[-1] < trace.losses[0] / 2, framework


def test_scales_and_skips_are_identical_across_frameworks(done: dict[str, dict[str, Trace]]) -> None:
    first, *others = done["mixed_float16"].values()
    assert first.scales[-1] == 2.0**17  # it grew, so the comparison means something
    for other in others:
        assert (other.scales, other.applied) == (first.scales, first.applied)


@pytest.mark.parametrize("name", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_stores_float32_parameters_and_half_the_activations(
    done: dict[str, dict[str, Trace]], name: str
) -> None:
    elements = sum(array.size for array in task(1).weights.values())
    for framework, trace in done[name].items():
        assert trace.parameter_bytes == 4 * elements, framework
        assert trace.activation_bytes < 0.6 * done["float32"][framework].activation_bytes, framework


def test_progress_is_told_once_for_every_step() -> None:
    adapters, _ = trainers()
    for adapter in adapters:
        told: list[int] = []
        adapter.train_digits(replace(task(steps=5), on_step=lambda told=told: told.append(1)))
        assert len(told) == 5, adapter.name
