"""Several logical devices: their number is fixed when TensorFlow starts, so these tests get a process of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_over_replicas() -> None:
    suite = Path(__file__).with_name("tensorflow_replicas.py")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--suite=tensorflow", "-p", "no:cacheprovider", str(suite)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
