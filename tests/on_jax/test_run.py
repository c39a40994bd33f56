"""`polyamp run` of JAX scripts: under a policy they are refused before they train, with the lines to write."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TRAINING = """
loss, grad = jax.value_and_grad(lambda w: (w * w).sum())(jnp.ones(3))
print(f"loss {loss}")
"""
SCRIPTS = {
    "jax": "import jax, jax.numpy as jnp\n" + TRAINING,
    "optax": "import optax\nfrom jax import numpy as jnp\nimport jax\n" + TRAINING,
    "flax": "from flax import nnx\nimport jax\nimport jax.numpy as jnp\n" + TRAINING,
}


def run(tmp_path: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(code)
    command = [sys.executable, "-m", "polyamp", "run", *options, "train.py"]
    return subprocess.run(command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True)


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_jax_script_is_refused_with_the_lines_to_write(kind: str, tmp_path: Path) -> None:
    done = run(tmp_path, SCRIPTS[kind], "--policy", "mixed_float16")
    assert done.returncode == 1
    assert "loss" not in done.stdout
    assert "train.py:" in done.stderr, "the line is named"
    assert "polyamp.wrap_optimizer(tx, policy)" in done.stderr
    assert "polyamp.value_and_grad(loss_fn, policy)" in done.stderr


def test_without_a_policy_it_runs_as_it_is(tmp_path: Path) -> None:
    done = run(tmp_path, SCRIPTS["jax"])
    assert (done.returncode, done.stdout) == (0, "loss 3.0\n")
