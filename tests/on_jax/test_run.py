"""`polyamp run` of JAX scripts: under a policy they are refused before they train, with the lines to write."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TRAINING = """
import jax, jax.numpy as jnp
loss, grad = jax.value_and_grad(lambda w: (w * w).sum())(jnp.ones(3))
print(f"loss {loss}")
"""


def run(tmp_path: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(code)
    command = [sys.executable, "-m", "polyamp", "run", *options, "train.py"]
    return subprocess.run(command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True)


def test_a_jax_script_is_refused_with_the_lines_to_write(tmp_path: Path) -> None:
    done = run(tmp_path, TRAINING, "--policy", "mixed_float16")
    assert done.returncode == 1
    assert "loss" not in done.stdout
    assert "train.py:" in done.stderr, "the line is named"
    assert "polyamp.wrap_optimizer(tx, policy)" in done.stderr
    assert "polyamp.value_and_grad(loss_fn, policy)" in done.stderr


def test_without_a_policy_it_runs_as_it_is(tmp_path: Path) -> None:
    done = run(tmp_path, TRAINING)
    assert (done.returncode, done.stdout) == (0, "loss 3.0\n")
