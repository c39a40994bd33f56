"""Tests in a process of their own: what a framework fixes when it starts, such as its devices, is theirs to set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_tests(file: Path, suite: str, *arguments: str | Path, **environment: str) -> str:
    """Run tests in a process of its own, see them pass, and return what it printed; arguments are those of pytest."""
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
