"""Eight devices: their number is fixed when JAX starts, so these tests run in another process, all in one."""

from __future__ import annotations

import os
from pathlib import Path

from support.own_process import run_tests

HERE = Path(__file__).parent


def test_on_eight_devices() -> None:
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    run_tests(HERE / "sharded.py", "jax", XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
