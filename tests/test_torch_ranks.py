"""Ranks of torch.distributed: each is a process of its own, in which pytest runs torch_ranks.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import polyamp
from polyamp.backends.torch.ranks import any_rank, has_peers


def test_two_ranks(tmp_path: Path) -> None:
    suite = Path(__file__).with_name("torch_ranks.py")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--suite=torch", "-p", "no:cacheprovider", str(suite)]
    environment = {**os.environ, "POLYAMP_TEST_RENDEZVOUS": str(tmp_path / "rendezvous"), "OMP_NUM_THREADS": "1"}
    runs = [
        subprocess.Popen(command, env={**environment, "RANK": rank}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in "01"
    ]
    outputs = [run.communicate(timeout=300)[0].decode() for run in runs]
    assert [run.returncode for run in runs] == [0, 0], "\n".join(outputs)
