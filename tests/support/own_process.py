"""Run tests in their own process, so that they can choose what a framework fixes at its start, such as devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_tests(file: Path, suite: str, *arguments: str | Path, **environment: str) -> str:
    """Run tests in another process, assert that they pass, and return the output; arguments are those of pytest."""
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            f"--suite={suite}",
            "-p",
            "no:cacheprovider",
            file,
            *arguments,
        ],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout
