"""The examples run as a user runs them, learn the digits, and stay short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("name", ["torch_digits.py", "jax_digits.py", "tensorflow_digits.py"])
def test_example_learns_the_digits_under_every_policy(name: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, EXAMPLES / name], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    heading, *rows = [line.split() for line in done.stdout.splitlines() if line.strip()]
    assert heading == ["policy", "accuracy", "loss", "scale", "skipped"]
    assert [row[0] for row in rows] == ["float32", "mixed_bfloat16", "mixed_float16"]
    assert all(float(row[1].rstrip("%")) > 90 for row in rows), done.stdout


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 60
