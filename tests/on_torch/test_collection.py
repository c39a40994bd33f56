"""A package that only tests use may be absent on a GPU machine, and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = Path(__file__).parent / "autocast" / "test_rules.py"
ABSENT = "raise ModuleNotFoundError(\"No module named '{0}'\", name='{0}')\n"


def collect(folder: Path, absent: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "expecttest.py").write_text(ABSENT.format(absent))
    paths = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    command = ["-m", "pytest", "--suite=torch", "--collect-only", "-q", "-p", "no:cacheprovider", *options, str(MODULE)]
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("absent", "options", "code"),
    [
        ("expecttest", ["--gpu"], pytest.ExitCode.NO_TESTS_COLLECTED),
        ("expecttest", [], pytest.ExitCode.INTERRUPTED),
        ("polyamp.unwritten", ["--gpu"], pytest.ExitCode.INTERRUPTED),
    ],
)
def test_only_on_a_gpu_machine_and_only_what_tests_use_may_be_absent(
    tmp_path: Path, absent: str, options: list[str], code: int
) -> None:
    done = collect(tmp_path, absent, *options)
    assert done.returncode == code, done.stdout + done.stderr
    assert ("this machine has no expecttest" in done.stdout) is (code == pytest.ExitCode.NO_TESTS_COLLECTED)
