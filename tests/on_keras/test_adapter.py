"""The Keras adapter's other verbs: casting and the frameworks that it imports."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers, ops

import polyamp
from polyamp.backends.keras import adapter, cast
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
