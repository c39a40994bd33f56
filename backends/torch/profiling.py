"""The function `profiler`: how a step runs under torch.profiler, and what the file of the profiler shows.

In that file an operator is an event of the CPU with its time and the dtypes of its inputs; it encloses the operators
that it calls. A kernel of a GPU names the operator that launched it. A backward node has the sequence number of the
operator that it differentiates, so it gets that operator's module path. polyamp adds the ranges of module paths.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

from polyamp.backends.torch.autocast.context import autocast
from polyamp.backends.torch.operations import canonical
from polyamp.backends.torch.step.optimizer import LossScaledOptimizer
from polyamp.backends.torch.tracking import ModuleHooks, Tracker
from polyamp.diagnosis.profile import Profiler, Timed, Trace, union
from polyamp.operations import is_product
from polyamp.policies import Policy

_FILE, _MODULE, _UPDATE, _COMPILED = "torch.pt.trace.json", "module: ", "Optimizer.", "Torch-Compiled Region"


def profiler(
    step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy | None
) -> Profiler:
    """Run a step, and return how it is profiled; see `polyamp.interface.Adapter.profiler`."""

    def call(*own: Any, **named: Any) -> Any:
        with nullcontext() if policy is None else autocast(policy):
            return step(*own, **named)

    call(*args, **kwargs)
    with torch.profiler.profile(acc_events=True) as second:
        call(*args, **kwargs)
    is_compiled = any(event.name.startswith(_COMPILED) for event in second.events())

    @contextmanager
    def tracing(folder: Path) -> Iterator[None]:
        with _named(paths=not is_compiled), torch.profiler.profile(record_shapes=True, acc_events=True) as found:
            yield
        found.export_chrome_trace(str(folder / _FILE))

    return Profiler("torch", call, _wait, tracing, _read)


def _wait(result: Any) -> None:
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
        stack.callback(setattr, LossScaledOptimizer, "make_step", make_step)
        LossScaledOptimizer.make_step = named_step  # type: ignore[method-assign, assignment]
        yield


# --- reading the file -------------------------------------------------------------------------------------------------


class _Range:
    """A host event, with the event around it, and its work without that of the events inside it."""

    operation: Timed  # without a name for what is not an operator

    def __init__(self, event: Mapping[str, Any], around: _Range | None, paths: dict[int, str]) -> None:
        arguments: Mapping[str, Any] = event.get("args", {})
        types, number = arguments.get("Input type", ()), arguments.get("Sequence number", 0)
        self.native: str = event["name"]
        self.around = around
        self.id = arguments.get("External id")
        self.end: float = event["ts"] + event["dur"]
        self.seconds: float = event["dur"] / 1e6  # less that of what is inside
        path = around.operation.where if around else ""
        if self.native.startswith(_MODULE):
            path = self.native.removeprefix(_MODULE)
        elif arguments.get("Fwd thread id"):
            path = paths.get(number, path)
        if number:
            paths[number] = path
        name, is_update = _name(self.native, types), self.native.startswith(_UPDATE)
        is_update = is_update or bool(around and around.operation.is_update)
        self.operation = Timed(name, path, _formats(name, types), is_update=is_update)
        self.called: _Range = around.called if around and around.operation.name else self  # the user called this one
        self.only_calls = False  # whether an operation inside does its work

    def does(self, other: _Range) -> bool:
        """Return whether two events are the same work, as ``linear`` and its product."""
        name, one = self.operation.name, other.operation.name
        return bool(name) and (name == one or (is_product(name) and is_product(one)))


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


def _formats(name: str, types: Sequence[Any]) -> tuple[str, ...]:
    """Return the formats of floating-point inputs."""
    known = {"float": "float32", "double": "float64", "c10::Half": "float16", "c10::BFloat16": "bfloat16"}
    floating = [known[one] for one in types if isinstance(one, str) and one in known]
    # The fourth may be a float32 statistic, as of attention's backward pass.
    return tuple(sorted(set(floating[:3] if is_product(name) else floating)))


def _read(folder: Path, runs: int) -> Trace:
    """Return what the profiler's file shows."""
    file = folder / _FILE
    events = json.loads(file.read_text())["traceEvents"]
    ranges, waits = _nested(events), defaultdict[str, float](float)
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not kernels:
        own = (one for one in ranges if one.operation.name and not one.only_calls)
        operations = tuple(one.operation._replace(seconds=one.seconds) for one in own)
        return Trace(str(file), "cpu", operations, sum(one.seconds for one in operations), {})
    for one in ranges:
        if "Synchronize" in one.native and one.around:
            native, path = one.around.called.native, one.operation.where
            waits[f"{native} at {path}" if path else native] += one.seconds
    launched = {one.id: one.operation for one in ranges if one.operation.name}
    operations = tuple(_of_kernel(one, launched.get(one["args"].get("External id"))) for one in kernels)
    busy = union((one["ts"] / 1e6, (one["ts"] + one["dur"]) / 1e6) for one in kernels)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "accelerator"
    return Trace(str(file), device, operations, busy, waits)


def _nested(events: Sequence[Any]) -> list[_Range]:
    """Return the events of the host in the order of time."""
    on_host = (one for one in events if one.get("cat") in ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"))
    found, threads, paths = list[_Range](), defaultdict[Any, list[_Range]](list), dict[int, str]()
    for event in sorted(on_host, key=lambda event: (event["ts"], -event["dur"])):
        stack = threads[event["tid"]]
        while stack and stack[-1].end <= event["ts"]:
            stack.pop()
        one = _Range(event, stack[-1] if stack else None, paths)
        for outer in stack:
            outer.only_calls |= one.does(outer)
        if stack:
            stack[-1].seconds -= one.seconds
        stack.append(one)
        found.append(one)
    return found


def _of_kernel(kernel: Mapping[str, Any], operation: Timed | None) -> Timed:
    """Return the operation that launched a kernel, else one named after the kernel."""
    if operation is None or operation.name == "call":
        operation = Timed("matmul" if _PRODUCT.search(kernel["name"]) else kernel["name"])
    return operation._replace(seconds=kernel["dur"] / 1e6)


_PRODUCT = re.compile("gemm|nvjet|cutlass|conv|_tem_fused", re.IGNORECASE)
