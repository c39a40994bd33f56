"""Several devices and processes: their number is fixed when JAX starts, so these tests run elsewhere."""

import os
from pathlib import Path

import pytest

from support.own_process import free_port, run_tests, run_together

HERE = Path(__file__).parent
FLAGS = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count="


@pytest.mark.slow
def test_on_eight_devices() -> None:
    """All files share a process: to start one takes as long as many tests."""
    files = (HERE / name for name in ("sharded.py", "steps.py", "autocast.py"))
    run_tests(next(files), "jax", *files, XLA_FLAGS=f"{FLAGS}8", JAX_PLATFORMS="cpu")


@pytest.mark.slow
def test_on_two_processes(tmp_path: Path) -> None:
    common = {
        "XLA_FLAGS": f"{FLAGS}2",
        "JAX_PLATFORMS": "cpu",
        "POLYAMP_TEST_PORT": str(free_port()),
        "POLYAMP_TEST_FOLDER": str(tmp_path),
    }
    each = [common | {"POLYAMP_TEST_RANK": rank} for rank in "01"]
    run_together(HERE / "processes.py", "jax", each, "-x", "--tb=short")
