"""Regions in which waiting for the GPU is an error, as the benchmarks count waits."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch_device import sync_mode  # of benchmarks/


def waits_are_errors() -> AbstractContextManager[None]:
    """A region in which whatever waits for the GPU raises a RuntimeError; after it nothing does, however it ended."""
    return sync_mode("error")
