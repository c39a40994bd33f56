"""Steps on several logical devices. Their number is fixed when TensorFlow starts, so each test starts a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.own_process import run_tests


@pytest.mark.parametrize(
    "strategy", ["mirrored", "without merging", "mirrored, one replica", "one worker", "one device"]
)
def test_over_replicas(strategy: str) -> None:
    run_tests(Path(__file__).with_name("replicas.py"), "tensorflow", POLYAMP_TEST_STRATEGY=strategy)
