"""A negative control breaks the training of unmodified code in every framework, and in the same way."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import polyamp
from polyamp.controls import Control, broken, for_policy
from polyamp.formats import FORMATS
from polyamp.testing import Session, random_arrays, same_bits, spoiled
from support.harness_jax import JaxHarness
from support.harness_keras import KerasHarness
from support.harness_tensorflow import TensorFlowHarness
from support.harness_torch import TorchHarness

HARNESSES: dict[str, Any] = {
    **{harness.name: harness for harness in (TorchHarness(), JaxHarness(), KerasHarness(), TensorFlowHarness())},
    "torch fused": TorchHarness(fused=True),
    "torch operators": TorchHarness(fused_step=True),
}
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
UNSCALED = Control("no loss scaling", polyamp.LossScale.fixed(1))
RATE = 0.5
LOW = ["mixed_float16", "mixed_bfloat16", "O2", "bfloat16"]

pytestmark = pytest.mark.parametrize("name", HARNESSES)


def rounding(policy: str) -> Control:
    return for_policy(policy)[-1]


def start(name: str, policy: str, control: Control | None, weights: Any = None, **options: Any) -> Session:
    arrays = random_arrays(0) if weights is None else weights
    chosen = polyamp.policy(policy)
    if control is None:
        return HARNESSES[name].start(arrays, chosen, learning_rate=RATE, **options)
    with broken(control) as tally:
        session: Session = HARNESSES[name].start(arrays, chosen, learning_rate=RATE, **options)
    assert tally.reached == 1
    return session


def in_float32(session: Session) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.asarray(array).astype(np.float32) for name, array in session.weights().items()}


@pytest.mark.parametrize("given", [None, polyamp.LossScale(init=2.0**10), polyamp.LossScale.none()])
def test_the_loss_is_not_scaled_whatever_the_user_passed(name: str, given: polyamp.LossScale | None) -> None:
    session = start(name, "mixed_float16", UNSCALED, loss_scale=given)
    results = [session.step(random_arrays(seed)) for seed in range(3)]
    assert [(result.applied, result.scale) for result in results] == [(True, 1.0)] * 3
    result = session.step(spoiled(random_arrays(3), np.inf))
    assert (result.applied, result.scale) == (False, 1.0)
    assert polyamp.save_loss_scale(session.holder)["scale"] == 1.0


@pytest.mark.parametrize("policy", LOW)
def test_small_updates_are_lost_only_under_the_control(name: str, policy: str) -> None:
    control, steps = rounding(policy), 16
    update = FORMATS[str(control.update_format)].epsilon / 8
    ones, small = ({"matrix": np.full((4, 3), value, np.float32)} for value in (1.0, -update / RATE))
    sessions = start(name, policy, None, ones), start(name, policy, control, ones)
    for _ in range(steps):
        assert all(session.step(small) for session in sessions)
    kept, lost = map(in_float32, sessions)
    assert (lost["matrix"] == 1).all()
    np.testing.assert_array_equal(kept["matrix"], np.float32(1 + steps * update))


@pytest.mark.parametrize("policy", LOW)
def test_every_update_is_rounded_to_nearest_even(name: str, policy: str) -> None:
    control = rounding(policy)
    session, dtype = start(name, policy, control), DTYPES[str(control.update_format)]
    stored = DTYPES.get(polyamp.policy(policy).param, np.float32)
    expected = {key: array.astype(stored).astype(np.float32) for key, array in random_arrays(0).items()}
    for seed in range(1, 5):
        grads = {key: array.astype(stored).astype(np.float32) for key, array in random_arrays(seed, 1e-2).items()}
        session.step(grads)
        expected = {
            key: (array - np.float32(RATE) * grads[key]).astype(dtype).astype(np.float32)
            for key, array in expected.items()
        }
        assert same_bits(in_float32(session), expected)


@pytest.mark.parametrize("policy", ["mixed_float16", "O2"])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_skipped_step_changes_nothing(name: str, policy: str, steps_before: int) -> None:
    session = start(name, policy, rounding(policy), optimizer="adam")
    for seed in range(steps_before):
        session.step(random_arrays(seed, 1e-2))
    weights, memory = session.weights(), session.memory()
    assert not session.step(spoiled(random_arrays(7, 1e-2), np.nan))
    assert same_bits(session.weights(), weights)
    assert same_bits(session.memory(), memory)


def test_what_is_wrapped_outside_the_block_is_not_broken(name: str) -> None:
    plain = start(name, "mixed_float16", None)
    with broken(UNSCALED), broken(rounding("mixed_float16")) as tally:
        pass
    after = start(name, "mixed_float16", None)
    for session in (plain, after):
        session.step(random_arrays(1))
    assert tally.reached == 0
    assert same_bits(plain.weights(), after.weights())
    assert plain.step(random_arrays(2)).scale == 2.0**16
