"""A control that rounds updates reaches ``fit`` on every backend of Keras, and optimizers stepped by hand."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import polyamp
from polyamp.controls import broken, for_policy
from support.harness_keras import to_numpy

X = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)
pytestmark = [pytest.mark.slow, pytest.mark.backends]

TRACED = {"eager": {"run_eagerly": True}, "compiled": {}, "jit": {"jit_compile": True}}
WAYS = ["eager", "compiled"] if keras.backend.backend() == "torch" else list(TRACED)  # no jit_compile there


def trained(policy: str, control: polyamp.controls.Control | None, way: str) -> list[np.ndarray]:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(2)])
    polyamp.convert(model, policy)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with broken(control) as tally:
        model.compile(polyamp.wrap_optimizer(keras.optimizers.Adam(1e-2), policy), loss, **TRACED[way])
    model.fit(X, Y, batch_size=16, epochs=2, verbose=0)
    assert tally.reached == 1
    return [to_numpy(variable) for variable in model.trainable_variables]


@pytest.mark.parametrize(("policy", "way"), [*(("mixed_float16", way) for way in WAYS), ("mixed_bfloat16", WAYS[-1])])
def test_fit_leaves_weights_that_the_format_holds(policy: str, way: str) -> None:
    unscaled, rounded = for_policy("mixed_float16")[0], for_policy(policy)[-1]
    for weight in trained(policy, rounded, way):
        assert np.array_equal(weight, to_numpy(keras.ops.cast(weight, rounded.update_format)).astype(np.float32))
    assert any(
        not np.array_equal(weight, weight.astype(np.float16).astype(np.float32))
        for weight in trained(policy, unscaled, way)
    )
