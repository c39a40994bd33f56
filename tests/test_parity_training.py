"""Real digits, trained in every framework from the same weights and batches, give the same losses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from polyamp.demo import POLICIES, Run, Trace, digits_task, runs, trainers

STEPS = 100

# Relative to the float32 loss of the same step, over the first STEPS steps. Formats that keep 11 and 8 significant bits
# round each product by 2**-11 and 2**-8; training carries that along.
TOLERANCE = {"float32": 1e-4, "mixed_float16": 2e-2, "mixed_bfloat16": 1e-1}


@pytest.fixture(scope="module")
def done() -> list[Run]:
    adapters, absent = trainers()
    assert absent == []
    return list(runs(adapters, digits_task(steps=STEPS)))


def traces(done: list[Run], policy: str) -> dict[str, Trace]:
    return {run.framework: run.trace for run in done if run.policy == policy}


def test_every_framework_trained_under_every_policy(done: list[Run]) -> None:
    assert len(done) == 3 * len(POLICIES)


@pytest.mark.parametrize("policy", TOLERANCE)
def test_losses_agree_across_frameworks(done: list[Run], policy: str) -> None:
    reference = next(iter(traces(done, "float32").values())).losses
    for name, trace in traces(done, policy).items():
        distance = np.max(np.abs(np.subtract(trace.losses, reference)) / np.maximum(np.abs(reference), 0.1))
        assert distance <= TOLERANCE[policy], f"{name}: {distance}"


@pytest.mark.parametrize("policy", TOLERANCE)
def test_training_learns_the_digits(done: list[Run], policy: str) -> None:
    for name, trace in traces(done, policy).items():
        assert trace.accuracy > 0.85, name
        assert trace.losses[-1] < trace.losses[0] / 2, name


def test_scales_and_skips_are_identical_across_frameworks(done: list[Run]) -> None:
    first, *others = traces(done, "mixed_float16").values()
    assert first.scales[-1] > first.scales[0]  # the scale grew, so that there was something to agree on
    for other in others:
        assert (other.scales, other.applied) == (first.scales, first.applied)


def test_mixed_precision_stores_float32_parameters_and_half_the_activations(done: list[Run]) -> None:
    for run in done:
        assert run.trace.parameter_bytes == 4 * sum(array.size for array in digits_task(1).weights.values())
        if run.policy != "float32":
            assert run.trace.activation_bytes < 0.6 * run.baseline.activation_bytes


def test_progress_is_told_once_for_every_step() -> None:
    adapters, _ = trainers()
    for adapter in adapters:
        told: list[int] = []
        adapter.train_digits(replace(digits_task(steps=5), on_step=lambda told=told: told.append(1)))
        assert len(told) == 5
