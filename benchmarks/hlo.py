"""Read the text of a compiled XLA program for a GPU, and count what its kernels read and write.

The text is what `compiled.as_text()` returns. This line of it is one kernel, which reads 8192×4096 and 4096 numbers and
writes 8192×4096; the computation that it calls describes the kernel's work, and moves nothing itself:

    %loop_add_fusion = bf16[8192,4096]{1,0} fusion(%dot, %bias), kind=kLoop, calls=%fused_add

Rules of counting:

- A fusion reads its operands once and writes its results once, however often its threads ask for a number.
- An operand that a fusion only slices or gathers from counts as read by the size of the slices. An operand that it
  updates in place by a dynamic-update-slice or a scatter counts as written by the size of the update; a scatter reads
  as much.
- A library call (cuBLAS, cuDNN) reads its operands and writes its results. Its workspace is not counted, since
  traffic there is not known.
- The body of a loop counts once for each turn; if XLA does not know the number of turns, once, and `Kernel.known` is
  false. Of a conditional, the branch that moves most counts.
- Parameters, constants, tuples and bitcasts move nothing.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

MOVES_NOTHING = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "domain"),
    *("partition-id", "replica-id", "copy-done", "async-update", "async-done", "add-dependency"),
}
CALLS = ("call", "async-start")
SLICES = ("slice", "dynamic-slice", "gather")
PRODUCTS = ("dot", "convolution", "ragged-dot")
LIBRARIES = {"__cublas": "cuBLAS", "__cudnn": "cuDNN", "__cub": "CUB"}
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
CALLED = re.compile(r"(?:calls|to_apply|body|condition|\w*computations?)=(?:\{([^}]*)\}|%?([\w.\-]+))")


@dataclass(frozen=True)
class Array:
    """A type such as ``bf16[8,4]``."""

    format: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Return the size: a bool takes a byte, and a token none."""
        bits = 8 if self.format == "pred" else int((re.findall(r"\d+", self.format) or [0])[0])
        return -(-math.prod(self.shape) * bits // 8)

    def __str__(self) -> str:
        return f"{self.format}[{','.join(map(str, self.shape))}]"


@dataclass(eq=False)
class Instruction:
    """One line. ``arrays`` are those of its result; a tuple has several."""

    name: str
    arrays: tuple[Array, ...]
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)

    @cached_property
    def called(self) -> dict[str, list[str]]:
        """Return the computations that it names, by the attribute that names them."""
        plain = STRING.sub('""', self.attributes)
        return {
            found[0].partition("=")[0]: re.findall(r"[\w.\-]+", (found[1] or found[2]).replace("%", ""))
            for found in CALLED.finditer(plain)
        }

    @property
    def turns(self) -> int | None:
        """Return the number of turns of a loop, if XLA knows it."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', self.attributes)
        return int(found[1]) if found else None

    @property
    def op_name(self) -> str:
        """Return the operation of the user's program that it comes from: the path of scopes, and the primitive."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1].replace("\\'", "'") if found else ""

    @property
    def target(self) -> str:
        """Return the target of a custom call, or the generator of a fusion."""
        found = re.search(r'custom_call_target="([^"]*)"|"fusion_backend_config":\{"kind":"([^"]*)"', self.attributes)
        return (found[1] or found[2]) if found else ""


@dataclass(eq=False)
class Computation:
    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: Instruction | None = None

    @cached_property
    def parameters(self) -> list[Instruction]:
        """The parameters in the order of the caller's operands."""
        found = [each for each in self.instructions.values() if each.opcode == "parameter"]
        return sorted(found, key=lambda each: int(each.operands[0]))

    @cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """Return the users of a value, each with the index of the operand."""
        found: dict[str, list[tuple[Instruction, int]]] = {name: [] for name in self.instructions}
        for each in self.instructions.values():
            for place, operand in enumerate(each.operands):
                if operand in found:
                    found[operand].append((each, place))
        return found

    def behind(self, name: str) -> Instruction:
        """Return the value behind bitcasts."""
        found = self.instructions[name]
        return self.behind(found.operands[0]) if found.opcode == "bitcast" else found


@dataclass(eq=False)
class Module:
    computations: dict[str, Computation]
    entry: Computation

    def called(self, instruction: Instruction) -> list[Computation]:
        return [self.computations[name] for names in instruction.called.values() for name in names]


@dataclass(frozen=True)
class Kernel:
    """A fusion, library call, copy or other operation that runs by itself.

    Attributes:
        kind: ``Triton``, ``cuBLAS``, ``cuDNN``, ``CUB``, ``copy``, or ``XLA`` for its own generators.
        products: the formats of the operands of each product in it, such as ``bf16 × bf16``.
        reads: bytes read in one run, by format.
        writes: bytes written in one run, by format.
        times: number of runs.
        known: whether XLA knows the numbers of turns of the loops around it.
    """

    name: str
    kind: str
    op_name: str
    products: tuple[str, ...]
    reads: Counter[str]
    writes: Counter[str]
    times: int
    known: bool

    @property
    def bytes(self) -> int:
        """The bytes of all runs."""
        return (self.reads.total() + self.writes.total()) * self.times


# ------------------------------------------------------------------------------------------------------------ reading


def parse(text: str) -> Module:
    """Read a module as XLA prints it; tables of source files before it are ignored."""
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if current is None and (header := COMPUTATION.match(line)) and not line.startswith("HloModule"):
            current = computations[header[2]] = Computation(header[2])
            entry = current if header[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (start := INSTRUCTION.match(line)):
            instruction = _instruction(start[2], line[start.end() :])
            current.instructions[instruction.name] = instruction
            current.root = instruction if start[1] else current.root
    if entry is None:
        raise ValueError("not the text of an HLO module: it has no ENTRY computation")
    return Module(computations, entry)


def _instruction(name: str, line: str) -> Instruction:
    """Read the part of a line after the equals sign: type, opcode, operands in parentheses, attributes."""
    end = _closing(line) if line.startswith("(") else line.index(" ")
    arrays = tuple(_array(*found.groups()) for found in ARRAY.finditer(line[:end]))
    opcode, _, rest = line[end:].strip().partition("(")
    close = _closing("(" + rest) - 1
    operands, attributes = rest[: close - 1], rest[close:]
    if opcode in ("parameter", "constant"):
        return Instruction(name, arrays, opcode, (operands,), attributes)
    return Instruction(name, arrays, opcode, tuple(re.findall(r"%([\w.\-]+)", operands)), attributes)


def _array(form: str, shape: str) -> Array:
    return Array(form, tuple(int(size.lstrip("<=")) for size in shape.split(",") if size))


def _closing(text: str) -> int:
    """Return the position of the parenthesis that closes the first one. Those in strings do not count."""
    depth = 0
    for found in re.finditer(r'"(?:[^"\\]|\\.)*"|[()]', text):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if not depth:
            return found.end()
    raise ValueError(f"this line of HLO ends within parentheses: {text[:200]}")


# ----------------------------------------------------------------------------------------------------------- counting


def kernels(module: Module) -> list[Kernel]:
    """Return all kernels of a program, in the order in which they run."""
    return list(_kernels(module, module.entry, 1, True))


def _kernels(module: Module, computation: Computation, times: int, known: bool) -> Iterator[Kernel]:
    for each in computation.instructions.values():
        if each.opcode == "while":
            yield from _turns(module, each, times, known)
        elif each.opcode == "conditional":
            branches = [list(_kernels(module, branch, times, known)) for branch in module.called(each)]
            yield from max(branches, key=lambda branch: sum(kernel.bytes for kernel in branch))
        elif each.opcode in CALLS:
            for called in module.called(each):
                yield from _kernels(module, called, times, known)
        elif each.opcode not in MOVES_NOTHING:
            yield _kernel(module, computation, each, times, known)


def _turns(module: Module, loop: Instruction, times: int, known: bool) -> Iterator[Kernel]:
    """Return the kernels of a loop; its condition has none if XLA knows the number of turns."""
    (body,), (condition,) = loop.called["body"], loop.called["condition"]
    if loop.turns is None:
        yield from _kernels(module, module.computations[condition], times, False)
    yield from _kernels(module, module.computations[body], times * (loop.turns or 1), known and loop.turns is not None)


def _kernel(module: Module, computation: Computation, each: Instruction, times: int, known: bool) -> Kernel:
    reads: Counter[str] = Counter()
    for name in set(each.operands):
        value = computation.instructions[name]
        if not value.arrays:
            continue
        read = sum(_read(module, each, place) for place, other in enumerate(each.operands) if other == name)
        reads[value.arrays[0].format] += min(read, value.bytes)
    writes = _written(module, computation, each)
    products = tuple(_products(module, computation, each))
    return Kernel(each.name, _kind(each), each.op_name, products, reads, writes, times, known)


def _kind(each: Instruction) -> str:
    if each.target.startswith("__triton"):
        return "Triton"
    library = next((name for start, name in LIBRARIES.items() if each.target.startswith(start)), None)
    return library or ("copy" if each.opcode.startswith("copy") else "XLA")


def _products(module: Module, computation: Computation, each: Instruction) -> Iterator[str]:
    if each.opcode == "fusion":
        for called in module.called(each):
            for inner in called.instructions.values():
                yield from _products(module, called, inner)
    elif each.opcode in PRODUCTS or (each.opcode == "custom-call" and _kind(each) in ("cuBLAS", "cuDNN")):
        yield " × ".join(computation.instructions[name].arrays[0].format for name in each.operands[:2])


def _read(module: Module, user: Instruction, place: int) -> int:
    """Return the bytes that one instruction reads of one operand, at most all of it."""
    whole = 1 << 62
    if user.opcode == "fusion":
        (called,) = module.called(user)
        return _read_in(module, called, called.parameters[place])
    if place == 0 and user.opcode in SLICES:
        return user.bytes
    return whole


def _read_in(module: Module, computation: Computation, value: Instruction) -> int:
    """Return the bytes of a value that its users in a fused computation read."""
    total = 0
    for user, place in computation.users[value.name]:
        if user.opcode == "bitcast":
            total += _read_in(module, computation, user)
        elif place == 0 and _in_place(computation, user):
            total += _update(computation, user).bytes if user.opcode == "scatter" else 0
        else:
            total += _read(module, user, place)
    passed_on = computation.root is not None and value.name == computation.root.name
    return min(value.bytes, total) if not passed_on else value.bytes


def _written(module: Module, computation: Computation, each: Instruction) -> Counter[str]:
    """Return the bytes, by format, that an instruction writes, or a fusion whose root it is."""
    if each.opcode == "fusion":
        (called,) = module.called(each)
        return _written(module, called, called.root) if called.root else Counter()
    if each.opcode == "tuple":
        parts = (computation.instructions[name] for name in each.operands)
        return sum((_written(module, computation, part) for part in parts), Counter())
    source = computation.behind(each.name)
    if source is not each and source.opcode != "parameter":
        return _written(module, computation, source)
    found: Counter[str] = Counter()
    for array in _update(computation, each).arrays if _in_place(computation, each) else _results(each):
        found[array.format] += array.bytes
    return found


def _results(each: Instruction) -> tuple[Array, ...]:
    """Return the results without the workspace at the end of a library call's tuple, and without a copy's inputs."""
    if each.opcode == "copy-start":
        return each.arrays[:1]
    last = each.arrays[-1]
    has_workspace = len(each.arrays) > 1 and each.opcode == "custom-call" and last.format in ("s8", "u8")
    return each.arrays[:-1] if has_workspace and len(last.shape) == 1 else each.arrays


def workspace(module: Module) -> int:
    """Return the bytes of the largest workspace that a library call asks for."""
    every = (each for computation in module.computations.values() for each in computation.instructions.values())
    calls = (each for each in every if each.opcode == "custom-call")
    return max((each.bytes - sum(array.bytes for array in _results(each)) for each in calls), default=0)


def _in_place(computation: Computation, each: Instruction) -> bool:
    """Return whether it updates, by a slice or a scatter, a buffer that its fusion takes and returns."""
    updates = each.opcode == "dynamic-update-slice" or (each.opcode == "scatter" and len(each.operands) == 3)
    return updates and computation.behind(each.operands[0]).opcode == "parameter" and _returned(computation, each)


def _returned(computation: Computation, each: Instruction) -> bool:
    """Return whether its only use is as result of the computation, alone or in a tuple."""
    users = [user for user, _ in computation.users[each.name]]
    if not users:
        return each is computation.root
    return all(user is computation.root and user.opcode == "tuple" for user in users) or (
        len(users) == 1 and users[0].opcode == "bitcast" and _returned(computation, users[0])
    )


def _update(computation: Computation, each: Instruction) -> Instruction:
    return computation.instructions[each.operands[1 if each.opcode == "dynamic-update-slice" else 2]]
