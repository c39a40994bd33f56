"""Checks compiler output and machine code for causes of slow kernels: spills and narrow accesses.

Assembler output: NVIDIA, CUDA Compiler Driver NVCC, Printing Code Generation Statistics. Machine code: CUDA Binary
Utilities, Instruction Set Reference (``LDG``, ``STG``: load from and store to global memory).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from polyamp.backends.torch.building.builder import Built
from polyamp.backends.torch.building.recipes import Job
from polyamp.backends.torch.building.toolchain import Nvcc, tool
from polyamp.errors import ExtensionError

REGISTERS = 64
"""With more, a multiprocessor with its 65536 registers runs fewer than 1024 threads, which are two blocks of 512."""

READ_ONLY = ("stats",)
"""Words in the names of kernels that write no tensor."""

IN_FLIGHT = {"grad_stats": 8, "unscale_clip": 8, "Adam": 6, "Sgd": 4}
"""By a word in a kernel's name: the 16-byte loads it must issue before it uses one. With fewer, memory idles."""

_ENTRY = r"Compiling entry function '(\S+)' for 'sm_(\d+)(\d)'"
_SASS = {"load": re.compile(r"\bLDG\.E\S*\.128\b"), "store": re.compile(r"\bSTG\.E\S*\.128\b")}


@dataclass(frozen=True)
class Kernel:
    """One kernel for one architecture."""

    name: str  # name of the kernel
    architecture: str  # such as ``"9.0"``
    registers: int  # registers per thread
    spills: int  # bytes that are stored and loaded because registers are missing
    parameters: int | None = None  # bytes of parameters
    # which of ``"load"`` and ``"store"`` occur with 16 bytes; None if machine code was not read
    wide: tuple[str, ...] | None = None
    # the most 16-byte loads that are issued before one of them is used; None if it was not read
    in_flight: int | None = None

    def problems(self) -> list[str]:
        """Return the problems on which a check fails."""
        found = [f"{self.spills} bytes of registers are spilled"] if self.spills else []
        if self.registers > REGISTERS:
            found.append(f"{self.registers} registers, more than {REGISTERS}")
        if self.wide is not None:
            needs = ["load"] if any(word in self.name for word in READ_ONLY) else ["load", "store"]
            found += [f"no {kind} of 16 bytes" for kind in needs if kind not in self.wide]
        needed = max((count for word, count in IN_FLIGHT.items() if word in self.name), default=0)
        if self.in_flight is not None and self.in_flight < needed:
            found.append(f"{self.in_flight} loads of 16 bytes before the first is used, fewer than {needed}")
        return [f"{self.name} for {self.architecture}: {text}" for text in found]


def examine(job: Job, built: Built) -> list[Kernel]:
    """Return every kernel of a build, for every architecture."""
    # Machine code is read if ``cuobjdump`` and ``nvdisasm`` are found.
    nvcc = job.toolchain.nvcc
    if nvcc is None:
        return []
    kernels = list(read_assembler(built.log))
    parameters, code = _parameters(job, nvcc), _machine_code(job, built.path)
    accesses = dict(read_machine_code(code)) if code is not None else None
    names = _demangled([kernel.name for kernel in kernels])
    return [
        replace(
            kernel,
            name=names[kernel.name],
            parameters=parameters.get(kernel.name),
            **({} if accesses is None else accesses.get((kernel.name, kernel.architecture), Accesses())._asdict()),
        )
        for kernel in kernels
    ]


def warnings(log: str) -> list[str]:
    """Return the lines with compiler warnings."""
    return [line for line in log.splitlines() if re.search(r"\bwarning\b", line) and not line.startswith("$ ")]


def read_assembler(log: str) -> Iterator[Kernel]:
    """Yield the kernels in the output of ``ptxas -v``; functions that a kernel calls are counted with it."""
    parts = re.split(_ENTRY, log)
    for name, major, minor, text in zip(*(parts[start::4] for start in range(1, 5)), strict=True):
        spills = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", text)))
        registers = max(map(int, re.findall(r"Used (\d+) registers", text)))
        yield Kernel(name, f"{major}.{minor}", registers, spills)


def read_parameters(ptx: str) -> Iterator[tuple[str, int]]:
    """Yield the bytes of each kernel's parameters."""
    for name, declared in re.findall(r"\.entry (\w+)\(([^)]*)\)", ptx):
        sizes = re.findall(r"\.[a-z](\d+) \w+(?:\[(\d+)\])?", declared)
        yield name, sum(int(bits) // 8 * int(count or 1) for bits, count in sizes)


class Accesses(NamedTuple):
    """The 16-byte accesses in a kernel's machine code; see `Kernel` for the attributes."""

    wide: tuple[str, ...] = ()
    in_flight: int = 0


def read_machine_code(code: str) -> Iterator[tuple[tuple[str, str], Accesses]]:
    """Yield the 16-byte accesses of each kernel and architecture, from the output of ``cuobjdump -sass``."""
    for part in re.split(r"code for sm_", code)[1:]:
        digits = re.match(r"\d+", part)
        architecture = f"{digits[0][:-1]}.{digits[0][-1]}" if digits else ""
        for function in part.split("Function : ")[1:]:
            name, _, body = function.partition("\n")
            wide = tuple(kind for kind, seen in _SASS.items() if seen.search(body))
            yield (name.strip(), architecture), Accesses(wide, most_in_flight(body))


def most_in_flight(body: str) -> int:
    """Return the most 16-byte loads that machine code issues in a row before it uses one of them, or jumps."""
    most, loaded = 0, set[int]()
    for instruction in re.findall(r"/\*[0-9a-f]{4,}\*/\s+([^;]*);", body):
        load = _SASS["load"].search(instruction)
        registers = [int(number) for number in re.findall(r"\bR(\d+)", instruction)]
        if loaded.intersection(registers[1:] if load else registers) or re.match(r"(BRA|EXIT|RET)\b", instruction):
            loaded = set()
        if load:
            loaded.update(range(registers[0], registers[0] + 4))
        most = max(most, len(loaded) // 4)
    return most


def _parameters(job: Job, nvcc: Nvcc) -> Mapping[str, int]:
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for source in (name for name in job.recipe.device if name.endswith(".cu")):
            output = Path(folder, f"{source}.ptx")
            _output_of(job.assembly(nvcc, source, str(output)))
            sizes |= read_parameters(output.read_text())
    return sizes


def _machine_code(job: Job, library: Path) -> str | None:
    cuobjdump, nvdisasm = tool("cuobjdump", job.toolchain), tool("nvdisasm", job.toolchain)
    if cuobjdump is None or nvdisasm is None:
        return None
    return _output_of([cuobjdump, "-sass", str(library)], NVDISASM_PATH=str(Path(nvdisasm).parent))


def _demangled(names: Sequence[str]) -> Mapping[str, str]:
    """Return names as in the source, without arguments; unchanged if ``c++filt`` is not found."""
    filt = shutil.which("c++filt")
    if filt is None:
        return {name: name for name in names}
    plain = _output_of([filt, *names]).splitlines()
    short = [re.sub(r"^void |\(polyamp::.*|polyamp::", "", text).replace(" >", ">") for text in plain]
    return dict(zip(names, short, strict=True))


def _output_of(command: Sequence[str], **environment: str) -> str:
    try:
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        output = getattr(error, "stderr", None) or str(error)
        raise ExtensionError("a tool of the check fails", where=command[0], found=output.strip()) from error
    return done.stdout
