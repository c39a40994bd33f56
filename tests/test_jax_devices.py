"""Several devices: the number of CPU devices is fixed when JAX starts, so these tests get a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_on_four_devices() -> None:
    suite = Path(__file__).with_name("jax_four_devices.py")
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--suite=jax", "-p", "no:cacheprovider", str(suite)],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "14 passed" in run.stdout
