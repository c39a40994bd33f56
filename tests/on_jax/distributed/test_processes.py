"""Two processes of ``jax.distributed``, in each of which pytest runs processes.py."""

from __future__ import annotations

import os
from pathlib import Path

from support.own_process import free_port, run_together


def test_on_two_processes(tmp_path: Path) -> None:
    common = {
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
        "POLYAMP_TEST_PORT": str(free_port()),
        "POLYAMP_TEST_FOLDER": str(tmp_path),
    }
    each = [common | {"POLYAMP_TEST_RANK": rank} for rank in "01"]
    run_together(Path(__file__).with_name("processes.py"), "jax", each, "-x", "--tb=short")
