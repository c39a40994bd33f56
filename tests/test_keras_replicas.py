"""Several logical devices: their number is fixed when TensorFlow starts, so these tests get processes of their own."""

from __future__ import annotations

import keras
import pytest
from own_process import run_tests

if keras.backend.backend() != "tensorflow":
    pytest.skip("for Keras on TensorFlow: --keras-backend=tensorflow", allow_module_level=True)


@pytest.mark.parametrize(
    "strategy", ["mirrored", "without merging", "mirrored, one replica", "one worker", "one device"]
)
def test_over_replicas(strategy: str) -> None:
    run_tests("keras_replicas.py", "keras", POLYAMP_TEST_STRATEGY=strategy)
