"""Distributed checkpoints of wrapped optimizers that are read on more ranks, on fewer, and over other meshes."""

from pathlib import Path

import pytest

from support.forked_ranks import outputs, run_ranks
from support.resharded_runs import RANKS, reshard

pytestmark = pytest.mark.slow


def test_checkpoints_are_read_over_other_meshes(tmp_path: Path) -> None:
    assert run_ranks(RANKS, reshard, tmp_path) == [0] * RANKS, outputs(tmp_path)
