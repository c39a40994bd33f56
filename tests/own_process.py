"""Tests in a process of their own: what a framework fixes when it starts, such as its devices, is theirs to set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_tests(file: str, suite: str, **environment: str) -> str:
    """Run a file of tests that lies beside this one, and see it pass; what it printed."""
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            f"--suite={suite}",
            "-p",
            "no:cacheprovider",
            Path(__file__).with_name(file),
        ],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout
