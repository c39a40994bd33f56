"""The function `time_step`: it runs a step under torch.profiler and reads the file that the profiler writes.

In that file an operator is an event of the CPU with its time, the dtypes of its inputs, and inside of it the operators
that it calls. A kernel of a GPU names the operator that launched it. A backward node has the sequence number of the
operator that it differentiates, so it gets that operator's module path. The ranges of module paths are ours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.profiler import record_function

from polyamp.backends.torch.autocast.context import autocast
from polyamp.backends.torch.operations import canonical
from polyamp.backends.torch.optimizer import LossScaledOptimizer
from polyamp.backends.torch.tracking import ModuleHooks, Tracker
from polyamp.diagnosis.profile import WARM_UP, Timed, Trace, union
from polyamp.operations import OPERATIONS
from polyamp.policies import Policy

_STEP, _MODULE, _UPDATE, _COMPILED = "polyamp: step", "module: ", "Optimizer.", "Torch-Compiled Region"
_FORMATS = {"float": "float32", "double": "float64", "c10::Half": "float16", "c10::BFloat16": "bfloat16"}


def time_step(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    policy: Policy | None,
    *,
    runs: int,
    folder: Path,
) -> Trace:
    """Run a step under the profiler; see `polyamp.adapters.Adapter.time_step`."""

    def run() -> None:
        with nullcontext() if policy is None else autocast(policy):
            step(*args, **kwargs)

    for _ in range(WARM_UP - 1):
        run()
    with torch.profiler.profile(acc_events=True) as profiler:  # its own start takes long too
        run()
        _wait()
    is_compiled = any(event.name.startswith(_COMPILED) for event in profiler.events())
    start = perf_counter()
    for _ in range(runs):
        run()
    _wait()
    seconds = perf_counter() - start
    with _named(paths=not is_compiled), torch.profiler.profile(record_shapes=True, acc_events=True) as profiler:
        for _ in range(runs):
            with record_function(_STEP):
                run()
        _wait()
    file = folder / "torch.pt.trace.json"
    profiler.export_chrome_trace(str(file))
    return _read(json.loads(file.read_text())["traceEvents"], seconds, str(file))


def _wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


@contextmanager
def _named(*, paths: bool) -> Iterator[None]:
    """Name the path of each module, and the step of a wrapped optimizer, in the profiler's file."""
    # Compiled code runs no module, and because of the hooks PyTorch would compile it once more, so then no path is.
    make_step, tracker, ranges = LossScaledOptimizer.make_step, Tracker(), list[ExitStack]()

    def enter(module: torch.nn.Module, inputs: Any) -> None:
        ranges.append(ExitStack())
        ranges[-1].enter_context(record_function(_MODULE + tracker.path))

    def leave(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        ranges.pop().close()

    def named_step(optimizer: LossScaledOptimizer, scaled: bool | None = None) -> Any:
        with record_function(f"{_UPDATE}step#{type(optimizer).__name__}.step"):
            return make_step(optimizer, scaled)

    with ExitStack() as stack:
        if paths:
            stack.enter_context(tracker.followed())
            stack.enter_context(ModuleHooks(enter, leave))
        LossScaledOptimizer.make_step = named_step  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            LossScaledOptimizer.make_step = make_step  # type: ignore[method-assign]


# --- reading the file -------------------------------------------------------------------------------------------------


class _Range:
    """An event of the CPU, and what is around and inside it."""

    def __init__(self, event: Mapping[str, Any], around: _Range | None, paths: Mapping[int, str]) -> None:
        native, arguments = event["name"], event.get("args", {})
        types = arguments.get("Input type", ())
        self.native, self.around = native, around
        self.end: float = event["ts"] + event["dur"]
        self.duration: float = event["dur"] / 1e6
        self.seconds = self.duration  # less that of what is inside
        self.name = _name(native, types)
        floating = [_FORMATS[one] for one in types if isinstance(one, str) and one in _FORMATS]
        if _does(self.name) == "product":  # the fourth may be a float32 statistic, as of attention's backward pass
            floating = floating[:3]
        self.formats = tuple(sorted(set(floating)))
        self.path: str = around.path if around else ""
        if native.startswith(_MODULE):
            self.path = native.removeprefix(_MODULE)
        elif arguments.get("Fwd thread id"):
            self.path = paths.get(arguments.get("Sequence number", -1), self.path)
        self.is_update: bool = native.startswith(_UPDATE) or bool(around and around.is_update)
        self.only_calls = False  # whether an operation inside does its work

    @property
    def outermost(self) -> _Range:
        """Return the operator that the user called."""
        return self.around.outermost if self.around and self.around.name else self

    def timed(self, seconds: float) -> Timed:
        """Return an operation that took this time."""
        return Timed(self.name, self.path, self.formats, seconds, self.is_update)


def _name(native: str, types: Sequence[Any]) -> str:
    """Return the canonical name of an operator, else its own; an empty string for what is not an operator."""
    library, separator, _ = native.partition("::")
    if native == "aten::copy_":
        return "cast" if len({*types[:2]}) > 1 else "identity"
    if native.startswith(_UPDATE):
        return "optimizer_update"
    if native.startswith(_COMPILED):
        return "call"
    if library == "aten":
        return canonical(native) or native
    return "custom_call" if separator and library not in ("autograd", "torch") else ""


def _read(events: Sequence[Any], seconds: float, file: str) -> Trace:
    """Return what the events of the file show."""
    on_host = sorted(
        (event for event in events if event.get("cat") in _ON_HOST), key=lambda event: (event["ts"], -event["dur"])
    )
    kernels = [event for event in events if event.get("cat") in _ON_DEVICE]
    ranges, waits = _nested(on_host), dict[str, float]()
    launched = {event["args"].get("External id"): one for event, one in zip(on_host, ranges, strict=True) if one.name}
    for one in ranges:
        if "Synchronize" in one.native and one.around:
            operation = one.around.outermost
            place = f"{operation.native} at {one.path}" if one.path else operation.native
            waits[place] = waits.get(place, 0.0) + one.seconds
    if not kernels:
        operations = tuple(one.timed(one.seconds) for one in ranges if one.name and not one.only_calls)
        profiled = sum(one.duration for one in ranges if one.native == _STEP)
        busy = sum(one.seconds for one in operations) / profiled
        return Trace("torch", "cpu", seconds, busy, operations, file, {})
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "accelerator"
    busy = union((one["ts"] / 1e6, (one["ts"] + one["dur"]) / 1e6) for one in kernels) / seconds
    operations = tuple(_of_kernel(one, launched.get(one["args"].get("External id"))) for one in kernels)
    return Trace("torch", device, seconds, busy, operations, file, waits)


_ON_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def _nested(events: Iterable[Mapping[str, Any]]) -> list[_Range]:
    """Return the ranges of events in the order of time, each with the one around it on its thread."""
    found, threads, paths = list[_Range](), dict[Any, list[_Range]](), dict[int, str]()
    for event in events:
        stack = threads.setdefault(event["tid"], [])
        while stack and stack[-1].end <= event["ts"]:
            stack.pop()
        one = _Range(event, stack[-1] if stack else None, paths)
        for outer in stack:
            outer.only_calls |= bool(one.name) and _does(one.name) == _does(outer.name)
        if stack:
            stack[-1].seconds -= event["dur"] / 1e6
        if number := event.get("args", {}).get("Sequence number"):
            paths[number] = one.path
        stack.append(one)
        found.append(one)
    return found


def _does(name: str) -> str:
    """Return the name of an operation, one name for all products: ``linear`` calls a product of matrices."""
    operation = OPERATIONS.get(name)
    return "product" if operation and operation.op_class == "lower" else name


def _of_kernel(kernel: Mapping[str, Any], operator: _Range | None) -> Timed:
    """Return the operation that launched a kernel; without one, what the kernel's name tells."""
    seconds = kernel["dur"] / 1e6
    if operator is not None and operator.name != "call":
        return operator.timed(seconds)
    return Timed("matmul" if _PRODUCT.search(kernel["name"]) else kernel["name"], "", (), seconds)


_PRODUCT = re.compile("gemm|nvjet|cutlass|conv|_tem_fused", re.IGNORECASE)
