"""The Keras adapter's other verbs: casting, the demo's classifier, and the frameworks that it imports."""

from __future__ import annotations

from dataclasses import replace

import keras
import numpy as np
import pytest
from keras import layers, ops

import polyamp
from polyamp.backends.keras import adapter, cast
from polyamp.demo import POLICIES, digits_task
from support.harness_keras import to_numpy

# Keras 3.15 calls __array__ as NumPy 1 did.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def test_cast_takes_variables_tensors_and_arrays_in_any_nest() -> None:
    tree = {"a": [keras.Variable([0.1])], "b": (ops.array([0.1]), np.array([0.1], "float32")), "c": "text"}
    done = cast(tree, "bfloat16")
    expected = np.float32(0.1).astype(done["b"][1].dtype)
    assert done["c"] == "text"
    assert {keras.backend.standardize_dtype(leaf.dtype) for leaf in (*done["a"], *done["b"])} == {"bfloat16"}
    assert all(to_numpy(leaf)[0] == expected for leaf in (*done["a"], done["b"][0]))


def test_cast_refuses_layers() -> None:
    with pytest.raises(polyamp.errors.UnsupportedError, match="convert"):
        polyamp.policy("float16").cast_to_param({"model": layers.Dense(2)})


def test_description_names_the_backend() -> None:
    assert adapter.describe()["title"] == f"keras on {keras.backend.backend()}"


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.compute)
def test_digits_are_learned_step_by_step(policy: polyamp.Policy) -> None:
    told: list[int] = []
    task = replace(digits_task(steps=60), policy=policy, on_step=lambda: told.append(1))
    trace = adapter.train_digits(task)
    assert len(trace.losses) == len(trace.scales) == len(trace.applied) == len(told) == 60
    assert trace.losses[-1] < trace.losses[0] / 2
    assert trace.accuracy > 0.7
    assert trace.parameter_bytes == 4 * sum(array.size for array in task.weights.values())
    elements = 64 * (2 * 8 * 8 * 16 + 4 * 4 * 16 + 2 * 4 * 4 * 32 + 2 * 2 * 32 + 10)
    assert trace.activation_bytes == elements * (4 if policy.compute == "float32" else 2)
