"""Several devices: the number of CPU devices is fixed when JAX starts, so these tests run in another process."""

from __future__ import annotations

import os
from pathlib import Path

from support.own_process import run_tests


def test_on_four_devices() -> None:
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    run_tests(
        Path(__file__).with_name("devices.py"),
        "jax",
        XLA_FLAGS=flags,
        JAX_PLATFORMS="cpu",
        POLYAMP_TEST_DEVICES="4",
    )
