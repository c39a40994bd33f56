"""The command for a GPU, rehearsed without one: from a checkout, by a Python that has no polyamp and few packages."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.other_python import python_without

ROOT = Path(__file__).parents[2]
NOT_THERE = ("polyamp", "expecttest", "jmp", "haiku", "dm_haiku", "orbax", "tensorflow", "tensorflow_cpu", "keras")


def rehearsed(tmp_path: Path, *parts: str) -> dict[str, dict[str, Any]]:
    """Run these parts, and return what they kept, by file."""
    python = python_without(tmp_path / "venv", *NOT_THERE)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "POLYAMP_"))}
    environment |= {"POLYAMP_RESULTS": str(tmp_path / "results"), "POLYAMP_EXTENSION": "off"}
    command = [str(python), str(ROOT / "benchmarks" / "gpu.py"), *parts, "--rehearse", "--within", "400"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = {path.name: json.loads(path.read_text()) for path in (tmp_path / "results").glob("*.json")}
    assert {one["part"]: one["status"] for one in kept["gpu.json"]["parts"]} == dict.fromkeys(parts, "passed")
    return kept


@pytest.mark.slow
def test_parts_run_from_a_checkout_that_nobody_installed(tmp_path: Path) -> None:
    kept = rehearsed(tmp_path, "kernels", "step")  # tests, collected but not run; and PyTorch
    assert kept["gpu.json"]["versions"].keys() >= {"torch", "jax"}
    assert kept["optimizer_step_small.json"]["left_out"] == []
    assert {row["variant"] for row in kept["optimizer_step_small.json"]["rows"]} >= {"native fused", "polyamp"}
