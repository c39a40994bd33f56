"""Regions in which waiting for the GPU is an error, as the benchmarks count waits."""

from contextlib import AbstractContextManager

from torch_device import sync_mode  # from benchmarks/


def waits_are_errors() -> AbstractContextManager[None]:
    """Make every wait for the GPU raise a RuntimeError inside the context, and never after it, however it ended."""
    return sync_mode("error")
