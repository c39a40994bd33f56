"""Several devices: the number of CPU devices is fixed when JAX starts, so these tests run in another process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.own_process import run_tests


@pytest.mark.parametrize("count", [4, 8])
def test_on_several_devices(count: int) -> None:
    flags = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={count}"
    run_tests(
        Path(__file__).with_name("devices.py"),
        "jax",
        XLA_FLAGS=flags,
        JAX_PLATFORMS="cpu",
        POLYAMP_TEST_DEVICES=str(count),
    )
