"""Several devices: the number of CPU devices is fixed when JAX starts, so these tests get a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("count", [4, 8])
def test_on_several_devices(count: int) -> None:
    suite = Path(__file__).with_name("jax_skip_devices.py")
    flags = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={count}"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--suite=jax", "-p", "no:cacheprovider", str(suite)],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "POLYAMP_TEST_DEVICES": str(count)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
