"""The function `time_step`: it runs a step under JAX's profiler and reads the file that the profiler writes.

In that file an event is an instruction of a compiled program. What the instruction does, in which formats, and which
code it came from are in the program's text, which JAX keeps as long as the program is loaded::

    %fusion.4 = f32[8,4]{1,0} fusion(%x, %w), kind=kLoop, calls=%fused.1, metadata={op_name="jit(step)/jvp(head)/tanh"}

is one event; it does what the instructions of ``%fused.1`` do, for the operation ``tanh`` in the scope ``head``.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from itertools import cycle
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from polyamp.backends.jax import unstable
from polyamp.backends.jax.graphs.rewrite import autocast, has_own_policy
from polyamp.backends.jax.modules import is_stateful
from polyamp.backends.jax.operations import OPERATIONS
from polyamp.diagnosis.profile import WARM_UP, Timed, Trace, union
from polyamp.policies import Policy


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
    with nullcontext() if policy is None else policy:
        is_own = policy is None or has_own_policy(step, args, dict(kwargs))
        call = step if is_own else jax.jit(autocast(step, policy))
        example = _copied((args, kwargs))
        _wait(call(*example[0], **example[1]))
        is_donated = any(leaf.is_deleted() for leaf in jax.tree.leaves(example) if isinstance(leaf, jax.Array))

        def arguments(count: int) -> list[Any]:
            each = [_copied((args, kwargs)) if is_donated else (args, kwargs) for _ in range(count)]
            _wait(each)
            return each

        def batch(each: list[Any]) -> float:
            """Run steps, on a CPU one after the other, and return the seconds."""
            start = perf_counter()
            for own_args, own_kwargs in each:
                result = call(*own_args, **own_kwargs)
                if jax.default_backend() == "cpu":  # which may run independent steps at the same time
                    _wait(result)
            _wait(result)
            return perf_counter() - start

        batch(arguments(WARM_UP - 1))  # the first has run
        seconds, each = batch(arguments(runs)), arguments(runs)
        with jax.profiler.trace(str(folder), profiler_options=_options()):
            profiled = batch(each)
    (file,) = folder.glob("**/*.xplane.pb")
    return _read(file, seconds, profiled, runs)


def _wait(result: Any) -> None:
    jax.block_until_ready(result)  # type: ignore[no-untyped-call]


def _copied(tree: Any) -> Any:
    """Return a tree with copies of its arrays, which a step may donate; objects of flax NNX stay the same."""
    return jax.tree.map(
        lambda leaf: jnp.array(leaf, copy=True) if isinstance(leaf, jax.Array) else leaf, tree, is_leaf=is_stateful
    )


def _options() -> Any:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # the calls of Python functions, which cost time
    return options


# --- reading the file -------------------------------------------------------------------------------------------------


class _Event(NamedTuple):
    """The run of one instruction on a device."""

    program: str  # the name of the compiled program
    instruction: str
    kernel: str
    start: float  # in seconds
    end: float


def _read(file: Path, seconds: float, profiled: float, runs: int) -> Trace:
    """Return what the events of the file show."""
    events = sorted(_events(file), key=lambda event: event.start)
    programs, is_cpu = _programs(events), jax.default_backend() == "cpu"
    by_program, operations = dict[str, list[_Event]](), list[Timed]()
    for event in events:
        by_program.setdefault(event.program, []).append(event)
    for name, own in by_program.items():
        program = programs[name] if name in programs else _Program("")
        operations += filter(None, program.timed_all(own, runs))
    busy = union((event.start, event.end) for event in events) / (profiled if is_cpu else seconds)
    device = "cpu" if is_cpu else jax.local_devices()[0].device_kind
    return Trace("jax", device, seconds, busy, tuple(operations), str(file), {})


def _events(file: Path) -> Iterator[_Event]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of JAX 0.9, about its own types
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for line in plane.lines:
                if plane.name.startswith("/host:") or line.name.startswith("Stream"):
                    for event in line.events:
                        stats = dict(event.stats)
                        if "hlo_op" in stats or line.name.startswith("Stream"):
                            program = str(stats.get("hlo_module", "")).partition("(")[0]
                            start, end = event.start_ns / 1e9, event.end_ns / 1e9
                            yield _Event(program, str(stats.get("hlo_op", "")), event.name, start, end)


class _Instruction(NamedTuple):
    """An instruction of a compiled program."""

    opcode: str
    format: str  # of its result; empty if that is not a floating-point array
    inputs: tuple[str, ...]  # the instructions that it reads
    calls: str  # the computation that a fusion is made of
    target: str  # the library's function that a custom call calls
    path: str  # its scopes and its primitive, as JAX names them
    is_update: bool  # whether an optimizer's update made it


class _Program:
    """A compiled program, read from its text."""

    def __init__(self, text: str) -> None:
        self.instructions: dict[str, _Instruction] = {}
        self.kernels: dict[str, str] = {}  # by the name of its kernel on a GPU
        self.members: dict[str, list[str]] = {}  # the instructions of each computation, in the order in which they run
        self.readers: dict[str, list[_Instruction]] = {}
        updates, members = _updates(text), list[str]()
        for line in text.splitlines():
            if found := _COMPUTATION.match(line):
                members = self.members[found[1]] = []
            elif found := _INSTRUCTION.match(line):
                name, kind, opcode, inputs, rest = found.groups()
                calls, target, path, frame = (_first(pattern, rest) for pattern in _ATTRIBUTES)
                reads, is_update = tuple(_NAME.findall(inputs)), frame in updates
                one = _Instruction(opcode, _FORMATS.get(kind, ""), reads, calls, target, path, is_update)
                self.instructions[name] = one
                self.kernels[re.sub("[.-]", "_", name)] = name
                members.append(name)
                for read in reads:
                    self.readers.setdefault(read, []).append(one)

    def has(self, names: set[str]) -> int:
        """Return how many of these names are names of its instructions."""
        return len(names & self.instructions.keys())

    def instruction_of(self, event: _Event) -> str:
        """Return the instruction that ran: of a CUDA graph, an event names the graph, and the kernel."""
        one = self.instructions.get(event.instruction)
        if one is not None and one.opcode not in _CALLS:
            return event.instruction
        return self.kernels.get(event.kernel, event.kernel)

    def does_product(self, name: str) -> bool:
        """Return whether an instruction, or a kernel of a library, computes a product."""
        one = self.instructions.get(name)
        return bool(_PRODUCT.search(name)) if one is None else self._product_in(one) is not None

    @cached_property
    def products(self) -> list[str]:
        """Return the instructions that compute products, in the order in which they run."""
        fused = {one.calls for one in self.instructions.values()}
        parts = (names for part, names in self.members.items() if part not in fused)
        return [name for names in parts for name in names if self.does_product(name)]

    def timed_all(self, events: Sequence[_Event], runs: int) -> Iterator[Timed | None]:
        """Yield the operation of each event of some runs, in the order of time."""
        names = [self.instruction_of(event) for event in events]
        unsure = [
            at for at, event in enumerate(events) if event.instruction != names[at] and self.does_product(names[at])
        ]
        if len(unsure) == runs * len(self.products):  # a library's kernels have no name of ours, and run in this order
            for at, name in zip(unsure, cycle(self.products), strict=False):
                names[at] = name
        for event, name in zip(events, names, strict=True):
            yield self.timed(name, event.end - event.start)

    def timed(self, name: str, seconds: float) -> Timed | None:
        """Return the operation of an instruction; None if it only runs others, which have times of their own."""
        one = self.instructions.get(name)
        if one is None:
            return self._of_library(name, seconds)
        if one.opcode in _CALLS:
            return None
        inside, product = [one, *self._inside(one)], self._product_in(one)
        placed = [product] if product else [*inside, *self.readers.get(name, ())]  # XLA forgets places of casts
        origin = next((each for each in placed if each.path), one)
        *scopes, primitive = _scopes(origin.path)
        reads = one.inputs if product is None else product.inputs
        if product is not None:
            name = "conv" if "conv" in product.opcode + product.target else "matmul"
        elif {each.opcode for each in inside} <= _OF_CASTS and any(each.opcode == "convert" for each in inside):
            name = "cast"
        else:
            name = "custom_call" if one.opcode == "custom-call" else OPERATIONS.get(primitive, primitive or one.opcode)
        is_update = any(each.is_update for each in inside) and product is None
        return Timed(name, "/".join(scopes), self._formats(reads), seconds, is_update)

    def _of_library(self, kernel: str, seconds: float) -> Timed:
        """Return the operation of a kernel that no instruction names: a product has the formats that all here have."""
        if not _PRODUCT.search(kernel):
            return Timed(kernel, "", (), seconds)
        products = (self._product_in(self.instructions[name]) for name in self.products)
        formats = {self._formats(one.inputs) for one in products if one}
        return Timed("matmul", "", formats.pop() if len(formats) == 1 else (), seconds)

    def _formats(self, names: Iterable[str]) -> tuple[str, ...]:
        known = {self.instructions[name].format for name in names if name in self.instructions}
        return tuple(sorted(known - {""}))

    def _product_in(self, one: _Instruction) -> _Instruction | None:
        return next((each for each in (one, *self._inside(one)) if _is_product(each)), None)

    def _inside(self, one: _Instruction) -> Iterator[_Instruction]:
        for name in self.members.get(one.calls, ()):
            yield self.instructions[name]
            yield from self._inside(self.instructions[name])


_CALLS = ("while", "conditional", "call")
_FORMATS = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^  (?:ROOT )?%?([\w.-]+) = \(?(\w+).*? ([a-z][\w-]*)\((.*?)\)(.*)$")
_NAME = re.compile(r"%([\w.-]+)")
_ATTRIBUTES = (r"calls=%([\w.-]+)", r'custom_call_target="([^"]*)"', r'op_name="([^"]*)"', r"stack_frame_id=(\d+)")
_OF_CASTS = {"fusion", "convert", "parameter", "constant", "broadcast", "bitcast", "copy", "transpose", "reshape"}
_PRODUCT = re.compile("gemm|nvjet|cutlass|matmul|conv|attention|fmha", re.IGNORECASE)


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[1] if found else ""


def _is_product(one: _Instruction) -> bool:
    is_call = one.opcode == "custom-call" and _PRODUCT.search(one.target)
    return one.opcode in ("dot", "convolution") or bool(is_call)


def _updates(text: str) -> set[str]:
    """Return the stack frames inside an optimizer's update: of optax, or of the wrapper around it."""
    files, names, places, frames = (
        _table(text, title) for title in ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
    )
    own, found = str(Path(__file__).with_name("optimizer.py")), set[str]()
    for frame, row in frames.items():  # callers come first
        place, caller = re.findall(r"=(\d+)", row)[:2]
        file, name = re.findall(r"=(\d+)", places[place])[:2]
        is_update = "update" in names[name] and ("optax" in files[file] or own in files[file])
        if is_update or str(int(caller) - 1) in found:  # XLA writes 1 for no caller, and 2 for the first frame
            found.add(frame)
    return found


def _table(text: str, title: str) -> dict[str, str]:
    """Return the rows of a table in front of a program, by their numbers."""
    rows = text.partition(f"\n{title}\n")[2].partition("\n\n")[0]
    return dict(row.split(" ", 1) for row in rows.splitlines())


def _scopes(path: str) -> list[str]:
    """Return the scopes of the user in ``jit(step)/transpose(jvp(head))/dot_general``, and the primitive's name."""
    parts: list[str] = []
    for part in path.split("/")[1:] if "/" in path else [path]:
        while found := re.fullmatch(r"[\w-]+\((.*)\)", part):
            part = found[1]
        if part and part not in _LOOPS and part != unstable.ISLAND and parts[-1:] != [part]:
            parts.append(part)
    return parts or [""]


_LOOPS = {"while", "body", "cond", "scan", "closed_call", "checkpoint", "rematted_computation"}


def _programs(events: Iterable[_Event]) -> dict[str, _Program]:
    """Return the programs that ran, by name. Of several with a name, the one that has most of these instructions."""
    seen: dict[str, set[str]] = {}
    for event in events:
        seen.setdefault(event.program, set()).update((event.instruction, event.kernel))
    found: dict[str, _Program] = {}
    for name, text in unstable.compiled_programs():
        if name in seen:
            program = _Program(text)
            if name not in found or program.has(seen[name]) > found[name].has(seen[name]):
                found[name] = program
    return found
