"""``keras.distribution``: the number of devices is fixed when JAX starts, so these tests run in another process."""

import os
from pathlib import Path

import keras
import pytest

from support.own_process import run_tests

if keras.backend.backend() != "jax":
    pytest.skip("for Keras on JAX: --keras-backend=jax", allow_module_level=True)


@pytest.mark.backends
def test_on_four_devices() -> None:
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    file = Path(__file__).with_name("layouts.py")
    run_tests(file, "keras", "--keras-backend=jax", XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
