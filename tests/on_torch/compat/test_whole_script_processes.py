"""Whole scripts that train in several processes: spawned by the script, or started by ``torchrun``."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "support" / "scripts"
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


def float32(name: str, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the losses of the scripts' batches in one float32 process, by rank 0's half of each batch."""
    monkeypatch.syspath_prepend(SCRIPTS)
    import digits  # type: ignore[import-not-found]
    import torch

    model = digits.model()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    whole = digits.batches(1, 128)[0]
    data = digits.batches(4) if name == "ranks" else list(zip(whole[0].split(32), whole[1].split(32), strict=True))
    for x, y in data:
        optimizer.zero_grad()
        halves = [torch.nn.functional.cross_entropy(model(x[rank::2]), y[rank::2]) for rank in (0, 1)]
        (sum(halves) / (2 if name == "ranks" else 1)).backward()
        optimizer.step()
        losses.append(halves[0].item())
    sys.modules.pop("digits")
    return losses


@pytest.mark.long
def test_spawned_processes_train_under_the_policy_and_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(tmp_path, *RUN, str(SCRIPTS / "spawned.py"), str(tmp_path / "out.json"))
    expected = float32("spawned", monkeypatch)
    losses = result(tmp_path, "out.json")["losses"]
    assert losses == pytest.approx(expected, rel=1e-3)
    assert losses != expected, "it did run in 16 bits"
    report = result(tmp_path, "report.json")
    assert [child["health"][0]["steps"] for child in report["children"]] == [4, 4]
    assert [child["plans"][0]["totals"]["by_format"] for child in report["children"]] == [{"float16": 2}] * 2
    assert report["verdicts"] == []
    assert done.stderr.count("loss scale:") == 1, "equal lines of ranks are shown once"
    assert done.stdout == ""


def test_ranks_of_torchrun_train_and_the_first_one_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    start = ("torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}", "-m")
    done = run(tmp_path, *start, *RUN, str(SCRIPTS / "ranks.py"), str(tmp_path / "out.json"))
    assert result(tmp_path, "out.json")["losses"] == pytest.approx(float32("ranks", monkeypatch), rel=1e-3)
    assert result(tmp_path, "report.json")["health"][0]["steps"] == 4
    assert done.stderr.count("polyamp run ") == 1
