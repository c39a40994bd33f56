"""Several logical devices: their number is fixed when TensorFlow starts, so these tests run in other processes."""

from __future__ import annotations

from pathlib import Path

import keras
import pytest

from support.own_process import run_tests

if keras.backend.backend() != "tensorflow":
    pytest.skip("for Keras on TensorFlow: --keras-backend=tensorflow", allow_module_level=True)


@pytest.mark.parametrize(
    "strategy", ["mirrored", "without merging", "mirrored, one replica", "one worker", "one device"]
)
def test_over_replicas(strategy: str) -> None:
    run_tests(Path(__file__).with_name("replicas.py"), "keras", POLYAMP_TEST_STRATEGY=strategy)
