"""`polyamp run` of JAX scripts: under a policy they are refused before they train, with the lines to write."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LINES = ("polyamp.wrap_optimizer(tx, policy)", "polyamp.value_and_grad(loss_fn, policy)")
TRAINING = """
loss, grad = jax.value_and_grad(lambda w: (w * w).sum())(jnp.ones(3))
print(f"loss {loss}")
"""
KERAS = """
import keras
keras.Sequential([keras.layers.Dense(1)]).compile("sgd", "mse")
print("loss")
"""
SCRIPTS = {
    "jax": ("import jax, jax.numpy as jnp\n" + TRAINING, LINES),
    "keras": (KERAS, ("polyamp.convert(model, policy)", "polyamp.wrap_optimizer(optimizer, policy)")),
}


def run(tmp_path: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(code)
    command = [sys.executable, "-m", "polyamp", "run", *options, "train.py"]
    environment = {**os.environ, "KERAS_BACKEND": "jax"}
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_script_on_jax_is_refused_with_the_lines_to_write(kind: str, tmp_path: Path) -> None:
    code, lines = SCRIPTS[kind]
    done = run(tmp_path, code, "--policy", "mixed_float16")
    assert done.returncode == 1
    assert "loss" not in done.stdout
    assert "train.py:" in done.stderr, "the line is named"
    assert all(line in done.stderr for line in lines)


def test_without_a_policy_it_runs_as_it_is(tmp_path: Path) -> None:
    done = run(tmp_path, SCRIPTS["jax"][0])
    assert (done.returncode, done.stdout) == (0, "loss 3.0\n")
