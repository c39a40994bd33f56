"""Rewritten steps with replicas, in a separate process: TensorFlow fixes the number of devices when it starts."""

from __future__ import annotations

from pathlib import Path

from support.own_process import run_tests


def test_over_replicas() -> None:
    run_tests(Path(__file__).with_name("rewrite_devices.py"), "tensorflow", POLYAMP_TEST_STRATEGY="mirrored")
