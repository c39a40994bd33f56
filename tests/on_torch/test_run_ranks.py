"""Whole scripts that train in several processes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[1] / "support" / "scripts"
RUN = ("polyamp", "run", "--policy", "mixed_float16", "--report", "report.json")


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(SCRIPTS), *filter(None, sys.path)])  # ``-P`` adds no folder of the script
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done


def result(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name).read_text())
    return found


def float32(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the losses of the scripts' batches in one float32 process, by rank 0's half of each batch."""
    monkeypatch.syspath_prepend(SCRIPTS)
    import digits  # type: ignore[import-not-found]
    import torch

    model = digits.model()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for x, y in digits.batches(4):
        optimizer.zero_grad()
        halves = [torch.nn.functional.cross_entropy(model(x[rank::2]), y[rank::2]) for rank in (0, 1)]
        (sum(halves) / 2).backward()
        optimizer.step()
        losses.append(halves[0].item())
    sys.modules.pop("digits")
    return losses


def test_ranks_of_torchrun_train_and_the_first_one_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    start = ("torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}", "-m")
    done = run(tmp_path, *start, *RUN, str(SCRIPTS / "ranks.py"), str(tmp_path / "out.json"))
    assert result(tmp_path, "out.json")["losses"] == pytest.approx(float32(monkeypatch), rel=1e-3)
    assert result(tmp_path, "report.json")["health"][0]["steps"] == 4
    assert done.stderr.count("polyamp run ") == 1
