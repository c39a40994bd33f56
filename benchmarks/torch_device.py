"""Meters of the GPU benchmarks: kernels and their time, waits, peak memory, and the device's copy bandwidth.

The tests of launches and of waits on a GPU use them too.
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
from torch.utils.flop_counter import FlopCounterMode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHECK_ONLY = "small sizes on a CPU: a check that this program runs, not a result"
Row = dict[str, Any]


def settle() -> None:
    """Wait until the device is idle."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


NO_KERNEL = re.compile(
    r"Mem(cpy|set)\b|Optimizer\.|Stream Wait\b|(Context|Device|Event|Stream|Unknown) Sync"
    r"|Activity Buffer|Buffer Flush|Command Buffer|Instrumentation$|Lazy Function|Resource$|Runtime Triggered"
)
"""Matches the start of other names that the profiler reports for a GPU: copies, fills, waits, and its own work."""


def is_kernel(name: str) -> bool:
    """Return whether an event on the GPU is a kernel, by its name."""
    return NO_KERNEL.match(name) is None


class Event(NamedTuple):
    """A piece of work on the GPU."""

    name: str
    microseconds: float


def device_events(run: Callable[[], Any]) -> list[Event]:
    """Return the work that ``run`` started on the GPU, as the profiler names it, without ranges that programs mark."""
    settle()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiled:
        run()
        settle()
    return [
        Event(event.name, event.time_range.elapsed_us())
        for event in profiled.events()
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]


def kernels(run: Callable[[], Any]) -> list[str]:
    """Return the names of the kernels that ``run`` started."""
    return [event.name for event in device_events(run) if is_kernel(event.name)]


class Launches(NamedTuple):
    """The work that one call started on the GPU. Copies and fills by the driver are not kernels."""

    kernels: int
    copies: int
    microseconds: float

    @classmethod
    def of(cls, events: list[Event]) -> Launches:
        """Count the profiler's events; waits and marks took no time of the device."""
        started = [event for event in events if is_kernel(event.name)]
        copies = [event for event in events if event.name.startswith(("Memcpy", "Memset"))]
        return cls(len(started), len(copies), sum(event.microseconds for event in (*started, *copies)))


def launches(prepare: Callable[[], Any], run: Callable[[], Any], times: int = 3) -> Launches | None:
    """Count the launches of ``run``, without those of ``prepare``: the median of some calls. None without a GPU."""
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
    """Make torch warn (``"warn"``) or fail (``"error"``) wherever the host waits for the GPU; reset it in any case.

    torch warns once that the mode is a prototype, *after* it set it; if warnings are errors, that is inside the try.
    """
    try:
        torch.cuda.set_sync_debug_mode(mode)
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def host_syncs(run: Callable[[], Any]) -> int | None:
    """Return how often ``run`` waits for the GPU, as far as torch sees it. None without a GPU."""
    if DEVICE != "cuda":
        return None
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with sync_mode("warn"):
            run()
    return sum(WAITS in str(one.message) for one in found)


def replayed(run: Callable[[], Any]) -> Callable[[], None] | None:
    """Capture ``run`` in a CUDA graph; return its replay, which needs no work of the host. None without a GPU.

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
    """An object, and the peak memory of making it and of its first calls; None without a GPU."""

    made: Any
    peak_bytes: int | None


def built(make: Callable[[], Any], warm_up: Callable[[Any], Any]) -> Built:
    """Make an object and warm it up, with no other allocations that would count."""
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
    """Free the memory that nothing uses any more."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def copy_bandwidth(size: int) -> float:
    """Return the bytes read and written per second by copies of one large tensor: the median of 20 times."""
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
def noting_failures(left_out: list[Row], **case: Any) -> Any:
    """Run a case; if it fails, for too little memory or another reason, record why it is left out."""
    try:
        yield
    except Exception as error:
        message = str(error).strip().splitlines() or [""]
        left_out.append({**case, "reason": f"{type(error).__name__}: {message[0][:300]}"})
    free_memory()


FORMATS = {"float32": torch.float32, "TF32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def use_tf32(on: bool) -> None:
    """Turn TensorFloat-32 on or off for products and for convolutions.

    PyTorch's own defaults are off for products and on for convolutions. These are the two older switches, and
    no other is set: PyTorch >= 2.9 raises if they are mixed with ``fp32_precision`` or ``matmul.allow_tf32``.
    """
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on


def matmul_peaks(size: int) -> dict[str, float]:
    """Return the measured operations per second of one large product in each format (not the promised ones)."""
    return {name: _matmul_rate(size, dtype, tf32=name == "TF32") for name, dtype in FORMATS.items()}


def _matmul_rate(size: int, dtype: torch.dtype, tf32: bool) -> float:
    use_tf32(tf32)
    one, other = (torch.randn(size, size, device=DEVICE).to(dtype) for _ in range(2))
    rates = []
    for _ in range(13):
        settle()
        start = time.perf_counter()
        for _ in range(5):
            one @ other
        settle()
        rates.append(5 * 2 * size**3 / (time.perf_counter() - start))
    return statistics.median(rates[3:])


def operations(run: Callable[[], Any]) -> int:
    """Count the multiplications and additions of one call's products, convolutions and attention."""
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())
