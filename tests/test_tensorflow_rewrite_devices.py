"""Rewritten steps over replicas: the number of logical devices is fixed when TensorFlow starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_over_replicas() -> None:
    suite = Path(__file__).with_name("tensorflow_devices.py")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--suite=tensorflow", "-p", "no:cacheprovider", str(suite)],
        env={**os.environ, "POLYAMP_TEST_STRATEGY": "mirrored"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
