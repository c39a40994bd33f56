"""Compile the kernels for every GPU architecture; fail on compiler warnings, spilled registers, or too many of them.

``python check.py``, with nvcc in ``CUDA_HOME`` or on ``PATH``; no GPU is needed. It prints a line for each kernel.
Spills are in the output of ``ptxas -v`` (NVIDIA, CUDA Compiler Driver NVCC, Printing Code Generation Statistics).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from polyamp.backends.torch.extension import CSRC, CXX_FLAGS, LIBRARIES, NVCC_FLAGS

ARCHITECTURES = ("75", "80", "86", "89", "90", "100", "120")  # Turing to Blackwell, which have Tensor Cores
REGISTERS = 64  # with more, a multiprocessor runs fewer than two blocks of 512 threads


class Kernel(NamedTuple):
    """One kernel for one architecture."""

    name: str
    architecture: str
    registers: int
    spills: int  # bytes that are stored and loaded because registers are missing

    def problem(self) -> str | None:
        """Return what makes this kernel slow, or None."""
        if self.spills:
            return f"{self.name} for {self.architecture}: {self.spills} bytes of registers are spilled"
        if self.registers > REGISTERS:
            return f"{self.name} for {self.architecture}: {self.registers} registers, more than {REGISTERS}"
        return None


def kernels(log: str) -> Iterator[Kernel]:
    """Yield the kernels in the output of ``ptxas -v``; functions that a kernel calls are counted with it."""
    parts = re.split(r"Compiling entry function '(\S+)' for '(sm_\d+)'", log)
    for name, architecture, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        spills = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", text)))
        registers = max(map(int, re.findall(r"Used (\d+) registers", text)))
        yield Kernel(name, architecture, registers, spills)


def warnings(log: str) -> list[str]:
    """Return the lines with compiler warnings."""
    return [line for line in log.splitlines() if re.search(r"\bwarning\b", line)]


def compiled(nvcc: Path, source: str) -> str:
    """Compile one source of the operators, and return the compiler's output."""
    if source.endswith(".cu"):
        codes = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in ARCHITECTURES]
        command = [str(nvcc), "-c", *NVCC_FLAGS, *codes, "-Xptxas=-v", "--threads=0"]
    else:
        include = Path(torch.__file__).parent / "include"
        folders = [include, include / "torch/csrc/api/include", nvcc.parents[1] / "include"]
        command = [os.environ.get("CXX") or "c++", "-c", "-fPIC", "-Wall", "-Wextra", *CXX_FLAGS]
        command += [*LIBRARIES["operators"].flags, *(f"-isystem{folder}" for folder in folders)]
    with tempfile.TemporaryDirectory() as folder:
        command += [str(CSRC / source), "-o", f"{folder}/object.o"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout)
    return done.stdout


def report(found: Sequence[Kernel], problems: Sequence[str]) -> None:
    """Print every kernel, then what is wrong; exit with 1 if anything is."""
    for kernel in found:
        print(f"{kernel.architecture:7} {kernel.registers:3} registers, {kernel.spills} bytes spilled  {kernel.name}")
    if problems:
        sys.exit("\n".join(problems))
    print(f"{len(found)} kernels: no warning, no spill")


def main() -> None:
    """Compile everything and report."""
    home = os.environ.get("CUDA_HOME")
    nvcc = Path(home, "bin", "nvcc") if home else Path(shutil.which("nvcc") or "nvcc")
    library = LIBRARIES["operators"]
    log = "".join(compiled(nvcc.resolve(), source) for source in (*library.device, *library.host))
    found = list(kernels(log))
    report(found, [*warnings(log), *filter(None, (kernel.problem() for kernel in found))])


if __name__ == "__main__":
    main()
