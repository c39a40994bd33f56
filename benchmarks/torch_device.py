"""What the GPU benchmarks measure with: kernels and their time, waits, peak memory, and how fast the device copies.

The tests of launches and of waits on a GPU count with it too.
"""

from __future__ import annotations

import gc
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
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


NO_KERNEL = re.compile(
    r"Mem(cpy|set)\b|Optimizer\.|Stream Wait\b|(Context|Device|Event|Stream|Unknown) Sync"
    r"|Activity Buffer|Buffer Flush|Command Buffer|Instrumentation$|Lazy Function|Resource$|Runtime Triggered"
)
"""Begins the names of what else the profiler reports of a GPU: copies, fills, waiting, and its own work."""


def is_kernel(name: str) -> bool:
    """Whether an event on the GPU is a kernel, by its name."""
    return NO_KERNEL.match(name) is None


class Event(NamedTuple):
    """Something that ran on the GPU."""

    name: str
    microseconds: float


def device_events(run: Callable[[], Any]) -> list[Event]:
    """What ``run`` started on the GPU, in the profiler's words; ranges that programs marked are left out."""
    settle()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        run()
        settle()
    return [
        Event(event.name, event.time_range.elapsed_us())
        for event in profiled.events()
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]


def kernels(run: Callable[[], Any]) -> list[str]:
    """The kernels that ``run`` started, by name."""
    return [event.name for event in device_events(run) if is_kernel(event.name)]


class Launches(NamedTuple):
    """What one call started on the GPU. Copies and fills by the driver are not kernels."""

    kernels: int
    copies: int
    microseconds: float

    @classmethod
    def of(cls, events: list[Event]) -> Launches:
        """Of the profiler's events: those that are waiting, or marks, took no time of the device."""
        started = [event for event in events if is_kernel(event.name)]
        copies = [event for event in events if event.name.startswith(("Memcpy", "Memset"))]
        return cls(len(started), len(copies), sum(event.microseconds for event in (*started, *copies)))


def launches(prepare: Callable[[], Any], run: Callable[[], Any], times: int = 3) -> Launches | None:
    """Of ``run`` alone, after ``prepare``: the median of so many calls. None without a GPU."""
    if DEVICE != "cuda":
        return None
    seen = []
    for _ in range(times):
        prepare()
        seen.append(Launches.of(device_events(run)))
    return Launches(*(statistics.median(values) for values in zip(*seen, strict=True)))


WAITS = "called a synchronizing CUDA operation"


@contextmanager
def sync_mode(mode: str) -> Iterator[None]:
    """Have torch warn (``"warn"``) or fail (``"error"``) wherever the host waits for the GPU; reset in any case.

    torch says once that the mode is a prototype, *after* it set it: where warnings are errors that is inside the try.
    """
    try:
        torch.cuda.set_sync_debug_mode(mode)
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def host_syncs(run: Callable[[], Any]) -> int | None:
    """How often ``run`` waits for the GPU, as far as torch sees it. None without a GPU."""
    if DEVICE != "cuda":
        return None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with sync_mode("warn"):
            run()
    return sum(WAITS in str(one.message) for one in said)


def replayed(run: Callable[[], Any]) -> Callable[[], None] | None:
    """A CUDA graph of what ``run`` does, to be replayed without the host's work for it. None without a GPU.

    Raises:
        RuntimeError: it cannot be captured, for example because it waits for the GPU.
    """
    if DEVICE != "cuda":
        return None
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        run()
    return graph.replay


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


@contextmanager
def noting_failures(left_out: list[Row], **case: Any) -> Any:
    """Run a case; where it fails, for too little memory or anything else, note why it was left out."""
    try:
        yield
    except Exception as error:
        said = str(error).strip().splitlines() or [""]
        left_out.append({**case, "reason": f"{type(error).__name__}: {said[0][:300]}"})
    free_memory()
