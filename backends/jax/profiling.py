"""The function `profiler`: how a step runs under JAX's profiler, and what the file of the profiler shows.

In that file an event is an instruction of a compiled program. What the instruction does, in which formats, and which
code it came from are in the program's text, which JAX keeps as long as the program is loaded::

    %fusion.4 = f32[8,4]{1,0} fusion(%x, %w), kind=kLoop, calls=%fused.1, metadata={op_name="jit(step)/jvp(head)/tanh"}

is one event; it does what the instructions of ``%fused.1`` do, for the operation ``tanh`` in the scope ``head``. A GPU
runs a CUDA graph as one instruction. Its events name kernels instead: ``fusion_4``, or the function of a library.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from polyamp.backends.jax import unstable
from polyamp.backends.jax.graphs.rewrite import autocast, has_own_policy
from polyamp.backends.jax.modules import is_stateful
from polyamp.backends.jax.operations import OPERATIONS
from polyamp.diagnosis.profile import Profiler, Timed, Trace, union
from polyamp.policies import Policy


def profiler(
    step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy | None
) -> Profiler:
    """Run a step, and return how to profile it; see `polyamp.interface.Adapter.profiler`."""
    is_own = policy is None or has_own_policy(step, args, dict(kwargs))
    call = step if is_own else jax.jit(autocast(step, policy))
    is_cpu = jax.default_backend() == "cpu"

    def run(*own: Any, **named: Any) -> Any:
        result = call(*own, **named)
        return _wait(result) if is_cpu else result  # a CPU may run independent steps at the same time

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # the calls of Python functions, which cost time
    example = _copied((args, kwargs))
    _wait(call(*example[0], **example[1]))
    found = Profiler("jax", run, _wait, partial(jax.profiler.trace, profiler_options=options), _read)
    is_donated = any(leaf.is_deleted() for leaf in jax.tree.leaves(example) if isinstance(leaf, jax.Array))
    return found._replace(fresh=_copied) if is_donated else found


def _copied(tree: Any) -> Any:
    """Return a tree with copies of its arrays, since a step can donate those; flax NNX objects stay the same."""
    return _wait(
        jax.tree.map(
            lambda leaf: jnp.array(leaf, copy=True) if isinstance(leaf, jax.Array) else leaf, tree, is_leaf=is_stateful
        )
    )


def _wait(result: Any) -> Any:
    return jax.block_until_ready(result)  # type: ignore[no-untyped-call]


# --- reading the file -------------------------------------------------------------------------------------------------


class _Event(NamedTuple):
    """One run of an instruction on a device; the earlier start sorts first."""

    start: float  # in seconds
    end: float
    program: str  # the name of the compiled program
    instruction: str
    kernel: str


def _read(folder: Path, runs: int) -> Trace:
    """Return what the profiler's file shows of some runs."""
    (file,) = folder.glob("**/*.xplane.pb")
    events, by_program = sorted(_events(file)), defaultdict[str, list[_Event]](list)
    for event in events:
        by_program[event.program].append(event)
    operations, modules = list[Timed](), list(unstable.compiled_programs())
    for name, own in by_program.items():
        programs = [_Program(module.to_string()) for module in modules if module.name == name] or [_Program("")]
        known = {_key(name) for event in own for name in (event.instruction, event.kernel)}
        program = max(programs, key=lambda one: len(known & one.instructions.keys()))
        operations += program.operations(own, runs)
    device = "cpu" if jax.default_backend() == "cpu" else jax.local_devices()[0].device_kind
    return Trace(str(file), device, tuple(operations), union((event.start, event.end) for event in events), {})


def _events(file: Path) -> Iterator[_Event]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of JAX 0.9, about its own types
        planes = jax.profiler.ProfileData.from_file(str(file)).planes
        lines = ((plane.name.startswith("/host:"), line) for plane in planes for line in plane.lines)
        for is_host, line in lines:
            for event in line.events if is_host or line.name.startswith("Stream") else ():
                stats = dict(event.stats)
                if "hlo_op" in stats or not is_host:
                    program, instruction = (str(stats.get(name, "")) for name in ("hlo_module", "hlo_op"))
                    start, end = event.start_ns / 1e9, event.end_ns / 1e9
                    yield _Event(start, end, program.partition("(")[0], instruction, event.name)


class _Instruction(NamedTuple):
    """An instruction, read from the program's text."""

    name: str
    type: str = ""  # of its first result
    opcode: str = ""
    inputs: str = ""
    calls: str = ""  # the computation that a fusion is made of
    target: str = ""  # the library's function that a custom call calls
    path: str = ""  # its scopes and its primitive, as JAX names them
    frame: str = ""  # the number of its stack frame

    @property
    def is_product(self) -> bool:
        """Return whether this is a product, not a fusion that contains one."""
        return self.opcode in ("dot", "convolution") or bool(_PRODUCT.search(self.target))


_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.-]+) \(.*\{((?:\n  .*)+)", re.MULTILINE)
_INSTRUCTION = re.compile(
    r"^  (?:ROOT )?%([\w.-]+) = \(?(\w+).*? ([a-z][\w-]*)\((.*?)\)(?:.*?calls=%([\w.-]+))?"
    r'(?:.*?custom_call_target="(.*?)")?(?:.*?op_name="(.*?)")?(?:.*?stack_frame_id=(\d+))?',
    re.MULTILINE,
)
_NAME = re.compile(r"%([\w.-]+)")
_FORMATS = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_CALLS = ("while", "conditional", "call")
_OF_CASTS = {"fusion", "convert", "parameter", "constant", "broadcast", "bitcast", "copy", "transpose", "reshape"}
_PRODUCT = re.compile("gemm|nvjet|cutlass|matmul|conv|attention|fmha", re.IGNORECASE)


class _Program:
    """A compiled program, read from its text."""

    def __init__(self, text: str) -> None:
        self._computations = {
            name: [_Instruction(*found) for found in _INSTRUCTION.findall(lines)]
            for name, lines in _COMPUTATION.findall(text)
        }
        self.instructions = {_key(one.name): one for part in self._computations.values() for one in part}
        self._updates, self._readers = _updates(text), defaultdict[str, list[_Instruction]](list)
        for one in self.instructions.values():
            for name in _NAME.findall(one.inputs):
                self._readers[name].append(one)
        fused = {one.calls for one in self.instructions.values()}
        parts = (part for name, part in self._computations.items() if name not in fused)
        self._products = [found for part in parts for one in part if (found := self._product_in(one))]

    def operations(self, events: Iterable[_Event], runs: int) -> Iterator[Timed]:
        """Yield a timed operation for each event in order, except for calls and loops."""
        found = {event: self._instruction_of(event) for event in events}
        unsure = [event for event, one in found.items() if one.name != event.instruction and self._product_in(one)]
        if len(unsure) == runs * len(self._products):  # a kernel may serve several products, which run in this order
            found.update(zip(unsure, cycle(self._products), strict=False))
        operations = {one: self._operation(one) for one in set(found.values()) if one.opcode not in _CALLS}
        for event, one in found.items():
            if one in operations:
                yield operations[one]._replace(seconds=event.end - event.start)

    def _instruction_of(self, event: _Event) -> _Instruction:
        one = self.instructions.get(_key(event.instruction))
        if one is None or one.opcode in _CALLS:  # a CUDA graph
            one = self.instructions.get(_key(event.kernel))
        return one or _Instruction(event.kernel, opcode=event.kernel, target=event.kernel)  # a function of a library

    def _operation(self, one: _Instruction) -> Timed:
        inside, product = list(self._inside(one)), self._product_in(one)
        placed = [product] if product else [*inside, *self._readers[one.name]]  # XLA forgets places of casts
        *scopes, primitive = _scopes(next((each.path for each in placed if each.path), ""))
        formats, opcodes = {self._formats(product or one)}, {each.opcode for each in inside}
        if product:
            name = "conv" if "conv" in product.opcode + product.target else "matmul"
            formats = formats if product.inputs else set(map(self._formats, self._products))
        elif "convert" in opcodes <= _OF_CASTS:
            name = "cast"
        else:
            name = "custom_call" if one.opcode == "custom-call" else OPERATIONS.get(primitive, primitive or one.opcode)
        is_update = product is None and any(each.frame in self._updates for each in inside)
        return Timed(name, "/".join(scopes), formats.pop() if len(formats) == 1 else (), is_update=is_update)

    def _formats(self, one: _Instruction) -> tuple[str, ...]:
        types = {self.instructions[_key(name)].type for name in _NAME.findall(one.inputs)}
        return tuple(sorted(_FORMATS[each] for each in types & _FORMATS.keys()))

    def _product_in(self, one: _Instruction) -> _Instruction | None:
        return next((each for each in self._inside(one) if each.is_product), None)

    def _inside(self, one: _Instruction) -> Iterator[_Instruction]:
        yield one
        for each in self._computations.get(one.calls, ()):
            yield from self._inside(each)


def _key(name: str) -> str:
    """Return the kernel's name for an instruction's name."""
    return re.sub("[.-]", "_", name)


def _updates(text: str) -> set[str]:
    """Return the numbers of stack frames inside an update of optax or of polyamp's optimizer."""
    files, names = (
        dict(re.findall(r'^(\d+) "(.*)"$', text.partition(f"\n{title}\n")[2].partition("\n\n")[0], re.MULTILINE))
        for title in ("FileNames", "FunctionNames")
    )
    places = {place: (files[file], names[name]) for place, file, name in _PLACE.findall(text)}
    own, found = str(Path(__file__).with_name("optimizer.py")), set[str]()
    for frame, place, caller in _FRAME.findall(text):  # callers come first
        file, name = places[place]
        is_update = "update" in name and ("optax" in file or own in file)
        if is_update or str(int(caller) - 1) in found:  # XLA writes 1 for no caller, and 2 for the first frame
            found.add(frame)
    return found


_PLACE = re.compile(r"^(\d+) {file_name_id=(\d+) function_name_id=(\d+)", re.MULTILINE)
_FRAME = re.compile(r"^(\d+) {file_location_id=(\d+) parent_frame_id=(\d+)", re.MULTILINE)


def _scopes(path: str) -> list[str]:
    """Return the user's scopes and the primitive: head, dot_general for ``jit(step)/jvp(head)/dot_general``."""
    parts: list[str] = []
    for part in path.split("/")[1:] if "/" in path else [path]:
        while found := re.fullmatch(r"[\w-]+\((.*)\)", part):
            part = found[1]
        if part and part not in _LOOPS and part != unstable.ISLAND and parts[-1:] != [part]:
            parts.append(part)
    return parts or [""]


_LOOPS = {"while", "body", "cond", "scan", "closed_call", "checkpoint", "rematted_computation"}
