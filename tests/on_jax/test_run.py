"""`polyamp run` of JAX scripts: under a policy they are refused before they train, with the lines to write."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import polyamp
from polyamp.backends.jax.run import begin
from polyamp.run import Refused, Session

LINES = ("polyamp.wrap_optimizer(tx, policy)", "polyamp.value_and_grad(loss_fn, policy)")
TRAINING = "import jax\nloss, grad = jax.value_and_grad(lambda w: w * w)(3.0)\nprint(f'loss {loss}')\n"


@pytest.mark.slow
def test_a_script_on_jax_is_refused_with_the_lines_to_write(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    command = [sys.executable, "-m", "polyamp", "run", "--policy", "mixed_float16", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ}, capture_output=True, text=True)
    assert done.returncode == 1
    assert "loss" not in done.stdout
    assert "train.py:2" in done.stderr, "the line is named"
    assert all(line in done.stderr for line in LINES)


def test_without_a_policy_it_runs_as_it_is() -> None:
    with Session() as session:
        begin(session)
        assert jax.value_and_grad(lambda w: w * w)(3.0) == (9.0, 6.0)
    with Session(polyamp.policy("mixed_float16")) as session:
        begin(session)
        with pytest.raises(Refused, match=r"polyamp\.value_and_grad"):
            jax.grad(lambda w: w * w)(3.0)
    assert jax.grad(lambda w: w * w)(3.0) == 6.0
