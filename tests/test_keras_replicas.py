"""Several logical devices: their number is fixed when TensorFlow starts, so these tests get processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("for Keras on TensorFlow: --keras-backend=tensorflow", allow_module_level=True)


@pytest.mark.parametrize(
    "strategy", ["mirrored", "without merging", "mirrored, one replica", "one worker", "one device"]
)
def test_over_replicas(strategy: str) -> None:
    suite = Path(__file__).with_name("keras_replicas.py")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--suite=keras", "-p", "no:cacheprovider", str(suite)],
        env={**os.environ, "POLYAMP_TEST_STRATEGY": strategy},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
