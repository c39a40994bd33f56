"""What the GPU benchmarks measure with: kernels and their time, peak memory, and how fast the device copies."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHECK_ONLY = "small sizes on a CPU: a check that this program runs, and no result"
Row = dict[str, Any]


def settle() -> None:
    """Wait until the device is idle."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


class Launches(NamedTuple):
    """What one call started on the GPU. Copies and fills by the driver are not kernels."""

    kernels: int
    copies: int
    microseconds: float


def launches(prepare: Callable[[], Any], run: Callable[[], Any], times: int = 5) -> Launches | None:
    """Of ``run`` alone, after ``prepare``: the median of so many calls. None without a GPU."""
    if DEVICE != "cuda":
        return None
    seen = [_launches_once(prepare, run) for _ in range(times)]
    return Launches(*(statistics.median(values) for values in zip(*seen, strict=True)))


def _launches_once(prepare: Callable[[], Any], run: Callable[[], Any]) -> Launches:
    prepare()
    settle()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        run()
        settle()
    events = [
        event
        for event in profiled.events()
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]
    events = [event for event in events if not event.name.startswith("Optimizer.")]
    copies = sum(event.name.startswith("Mem") for event in events)
    return Launches(len(events) - copies, copies, sum(event.time_range.elapsed_us() for event in events))


class Built(NamedTuple):
    """What was made, and the most memory that making it and its first calls took; None without a GPU."""

    made: Any
    peak_bytes: int | None


def built(make: Callable[[], Any], warm_up: Callable[[Any], Any]) -> Built:
    """Make something and warm it up alone, so that its memory is its own."""
    if DEVICE != "cuda":
        made = make()
        warm_up(made)
        return Built(made, None)
    free_memory()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    made = make()
    warm_up(made)
    settle()
    return Built(made, torch.cuda.max_memory_allocated() - before)


def free_memory() -> None:
    """Give back what nothing holds any more."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def copy_bandwidth(size: int) -> float:
    """Bytes read and written in a second, where one large tensor is copied to another: the median of 20 times."""
    one = torch.randn(size // 4, device=DEVICE)
    other = torch.empty_like(one)
    rates = []
    for _ in range(23):
        settle()
        start = time.perf_counter()
        for _ in range(5):
            other.copy_(one)
        settle()
        rates.append(5 * 2 * size / (time.perf_counter() - start))
    return statistics.median(rates[3:])


@contextmanager
def memory_permitting(left_out: list[Row], **case: Any) -> Any:
    """Run a case; where the GPU has too little memory for it, note that it was left out."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        left_out.append({**case, "reason": str(error).splitlines()[0]})
    free_memory()
