"""Run tests in their own process, so that they can choose what a framework fixes at its start, such as devices."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SECONDS = 300
"""The time after which a process that waits for another one is ended."""


def run_tests(file: Path, suite: str, *arguments: str | Path, **environment: str) -> str:
    """Run tests in another process, assert that they pass, and return the output; arguments are those of pytest."""
    return run_together(file, suite, [environment], *arguments)


def run_together(file: Path, suite: str, environments: Sequence[dict[str, str]], *arguments: str | Path) -> str:
    """Run the same tests in several processes at once; otherwise as `run_tests`."""
    command = [sys.executable, "-m", "pytest", "-q", f"--suite={suite}", "-p", "no:cacheprovider", file, *arguments]
    # Each has its own folder for temporary files: pytest's cleaning of a shared one fails now and then.
    folders = [tempfile.TemporaryDirectory() for _ in environments]
    runs = [
        subprocess.Popen(
            command,
            env={**os.environ, "PYTEST_DEBUG_TEMPROOT": folder.name, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for folder, own in zip(folders, environments, strict=True)
    ]
    try:
        outputs = [run.communicate(timeout=SECONDS)[0] for run in runs]
    finally:
        for run in runs:
            run.kill()
        for folder in folders:
            folder.cleanup()
    assert not any(run.returncode for run in runs), "\n".join(outputs)
    return "\n".join(outputs)


def free_port() -> int:
    """Return a port of this machine that was free a moment ago."""
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return int(one.getsockname()[1])


def tensorflow_workers(count: int) -> list[dict[str, str]]:
    """Return the environments of the processes that share a ``MultiWorkerMirroredStrategy``."""
    workers = [f"localhost:{free_port()}" for _ in range(count)]
    cluster = {"cluster": {"worker": workers}}
    return [{"TF_CONFIG": json.dumps(cluster | {"task": {"type": "worker", "index": index}})} for index in range(count)]
