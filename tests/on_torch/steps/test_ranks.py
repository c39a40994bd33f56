"""Ranks of torch.distributed: each is a process of its own, in which pytest runs ranks.py or meshes.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from polyamp.backends.torch.step.ranks import RankSet, has_peers

pytestmark = pytest.mark.slow

LAUNCH = """
import os, sys
import pytest, torch.distributed.checkpoint.state_dict, torch.distributed.fsdp, polyamp.backends.torch
suite, folder, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
for rank in range(count):  # forked, so that each rank need not import PyTorch
    if not os.fork():
        os.environ["RANK"] = str(rank)
        output = os.open(f"{folder}/rank{rank}", os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1), os.dup2(output, 2)
        options = ["-q", "-x", "--tb=short", "--suite=torch", "-p", "no:cacheprovider"]
        os._exit(pytest.main([*options, suite]))
sys.exit(any([os.wait()[1] for _ in range(count)]))
"""


@pytest.mark.parametrize(("suite", "count"), [("ranks.py", 2), ("meshes.py", 4)])
def test_ranks_that_step_together(suite: str, count: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LAUNCH, str(Path(__file__).with_name(suite)), str(tmp_path), str(count)]
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment = {**os.environ, **threads, "POLYAMP_TEST_RENDEZVOUS": str(tmp_path / "rendezvous")}
    done = subprocess.run(command, env=environment, timeout=300, check=False)
    assert done.returncode == 0, "\n".join((tmp_path / f"rank{rank}").read_text() for rank in range(count))


def test_without_other_ranks_nothing_is_combined() -> None:
    assert not has_peers()


@pytest.mark.parametrize(
    ("bits", "members", "text"),
    [
        ([0b10], None, "rank 1"),
        ([0b111], None, "ranks 0, 1, 2"),
        ([1 << 62, 0b11], None, "ranks 62, 63, 64"),
        ([0b11], [4, 7], "ranks 4, 7"),
        ([2**20 - 1], None, "20 ranks: 0, 1, 2, 3, 4, 5, 6, 7, ..."),
    ],
)
def test_bits_name_ranks(bits: list[int], members: list[int] | None, text: str) -> None:
    assert str(RankSet(torch.tensor(bits), members, here=0)) == text
