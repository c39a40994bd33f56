"""A loss-scale state that was saved in one framework continues in any other; casts of trees; masters left out."""

import itertools
import json
from typing import Any

import numpy as np
import pytest

import polyamp
from support.conformance import SETTINGS
from support.harness import overflow_trace, random_arrays, spoiled
from support.harness_jax import JaxHarness
from support.harness_keras import KerasHarness
from support.harness_tensorflow import TensorFlowHarness
from support.harness_torch import TorchHarness

HARNESSES = {harness.name: harness for harness in (TorchHarness(), JaxHarness(), KerasHarness(), TensorFlowHarness())}
SPOILS = (np.inf, -np.inf, np.nan)


def start(name: str, policy: str = "mixed_float16", **options: Any) -> Any:
    return HARNESSES[name].start(random_arrays(0), polyamp.policy(policy), **options)


def drive(session: Any, trace: list[bool]) -> list[tuple[bool, float, int]]:
    """Step through an overflow trace, with a changing kind of non-finite value, and record the messages."""
    record = []
    for step, finite in enumerate(trace):
        grads = random_arrays(step, scale=1e-3)
        result = session.step(grads if finite else spoiled(grads, SPOILS[step % 3]))
        record.append((result.applied, result.scale, result.skipped_in_a_row))
    return record


@pytest.mark.parametrize(("source", "target"), list(itertools.pairwise([*HARNESSES, next(iter(HARNESSES))])))
def test_state_continues_in_another_framework(source: str, target: str) -> None:
    config, trace = SETTINGS["hysteresis"], overflow_trace(seed=4, steps=60)
    first, second = start(source, loss_scale=config), start(target, loss_scale=config)
    drive(first, trace[:25])
    saved = json.loads(json.dumps(polyamp.save_loss_scale(first.holder)))
    second.load_loss_scale(saved)
    assert polyamp.save_loss_scale(second.holder) == saved
    assert drive(second, trace[25:]) == drive(first, trace[25:])


def test_a_tree_of_several_frameworks_is_cast_whole() -> None:
    trees = {name: harness.tree({"x": np.ones(2, np.float32)}) for name, harness in HARNESSES.items()}
    cast = polyamp.policy("mixed_float16").cast_to_compute(trees)
    assert all(harness.arrays(cast[name])["x"].dtype == np.float16 for name, harness in HARNESSES.items())


@pytest.mark.parametrize("name", HARNESSES)
def test_masters_can_be_left_out(name: str) -> None:
    weights = {key: np.ones_like(array) for key, array in random_arrays(0).items()}
    policy = polyamp.policy("O2")
    session = HARNESSES[name].start(weights, policy, learning_rate=1.0, master_weights=False)
    for _ in range(4):
        session.step({key: np.full_like(array, 2.0**-13) for key, array in weights.items()})
    assert all((array == 1.0).all() and array.dtype == np.float16 for array in session.weights().values())


@pytest.mark.parametrize("name", ["torch", "keras", "tensorflow"])
def test_what_was_not_wrapped_holds_no_loss_scale(name: str) -> None:
    with pytest.raises(polyamp.errors.InvalidTypeError, match="holds no loss scale"):
        polyamp.save_loss_scale(HARNESSES[name].plain_optimizer())
