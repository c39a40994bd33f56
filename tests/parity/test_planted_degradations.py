"""`polyamp.parity` calls every planted degradation worse, and equivalent what is, on real data in two frameworks.

The task is the digits of scikit-learn, as raw counts of a sensor, with a layer norm and a log softmax written out.
Numbers that float16 loses are in all its parts: the variance of large values, a small epsilon, the small gradients
behind a norm of large values.
"""

from __future__ import annotations

from types import ModuleType

import pytest

import polyamp
from polyamp import LossScale
from polyamp.equivalence.comparison import Comparison
from support import planted_jax, planted_torch

FRAMEWORKS = {"torch": planted_torch, "jax": planted_jax}
SEEDS, MARGIN = 6, "5%"
PLANTED = {
    "norm in 16 bits": polyamp.policy("mixed_float16", rules={"norm/*": "lower"}),
    "log softmax in 16 bits": polyamp.policy("mixed_float16", rules={"probabilities/*": "lower"}),
    "scale too small": polyamp.policy("mixed_float16", loss_scale=LossScale.fixed(2.0**-10)),
}

pytestmark = pytest.mark.filterwarnings("ignore::polyamp.PolyampWarning")  # what breaks here reports itself too


@pytest.fixture(scope="module", params=FRAMEWORKS)
def task(request: pytest.FixtureRequest) -> ModuleType:
    return FRAMEWORKS[request.param]


@pytest.fixture(scope="module")
def compared(task: ModuleType) -> dict[str, Comparison]:
    policies = {**PLANTED, "undamaged": polyamp.policy("mixed_bfloat16")}
    found = polyamp.parity(
        task.classify, list(policies.values()), seeds=SEEDS, margin=MARGIN, controls=False, progress=False
    )
    return dict(zip(policies, found.comparisons, strict=True))


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_degradation_is_worse(compared: dict[str, Comparison], name: str) -> None:
    assert compared[name].verdict == "worse"
    if name != "norm in 16 bits":  # it can diverge; the others are judged by their numbers
        assert compared[name].difference is not None


def test_what_is_not_damaged_is_equivalent(compared: dict[str, Comparison]) -> None:
    assert compared["undamaged"].verdict == "equivalent"


def test_an_optimizer_that_loses_its_second_moments_is_worse(task: ModuleType) -> None:
    found = polyamp.parity(
        task.classify_with_adam,
        ["mixed_float16", "mixed_bfloat16"],
        seeds=SEEDS,
        margin=MARGIN,
        controls=False,
        progress=False,
    )
    assert [one.verdict for one in found.comparisons] == ["worse", "equivalent"]


def test_the_task_can_tell_that_the_loss_is_scaled(task: ModuleType) -> None:
    found = polyamp.parity(task.classify, "mixed_float16", seeds=SEEDS, margin=MARGIN, progress=False)
    assert found.verdict == "equivalent"
    verdicts = {control.control: (control.verdict, control.was_reached) for control in found.ways[1:]}
    assert verdicts == {"no loss scaling": ("worse", True), "16-bit updates": ("equivalent", True)}


def test_the_rules_of_calibrate_make_training_equivalent(task: ModuleType) -> None:
    calibration = task.calibrated()
    assert calibration.rules == {"first/matmul": "full"}
    assert calibration.is_safe
    found = polyamp.parity(
        task.classify_overflowing,
        ["mixed_float16", calibration.policy],
        seeds=SEEDS,
        margin=MARGIN,
        controls=False,
        progress=False,
    )
    assert [one.verdict for one in found.comparisons] == ["worse", "equivalent"]
