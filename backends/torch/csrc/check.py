"""Compile the operators for every GPU architecture, where each warning of a compiler is an error.

``python check.py``, with nvcc in ``CUDA_HOME`` or on ``PATH``; no GPU is needed. Launch bounds leave
a kernel 64 registers, so that a multiprocessor runs two blocks. ptxas warns if a kernel needs more and spills them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from polyamp.backends.torch.extension import CSRC, CXX_FLAGS, LIBRARIES, NVCC_FLAGS

ARCHITECTURES = ("75", "80", "86", "89", "90", "100", "120")  # Turing to Blackwell, which have Tensor Cores


def command(nvcc: Path, source: str) -> list[str]:
    """Return the command that compiles one source of the operators."""
    if source.endswith(".cu"):
        codes = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in ARCHITECTURES]
        strict = ["-Werror=all-warnings", "-Xptxas=-warn-spills,-Werror", "--threads=0"]
        return [str(nvcc), "-c", *NVCC_FLAGS, *strict, *codes, str(CSRC / source)]
    include = Path(torch.__file__).parent / "include"
    folders = [include, include / "torch/csrc/api/include", nvcc.parents[1] / "include"]
    compiler = [os.environ.get("CXX") or "c++", "-c", "-fPIC", "-Wall", "-Wextra", "-Werror", *CXX_FLAGS]
    return [*compiler, *LIBRARIES["operators"].flags, *(f"-isystem{folder}" for folder in folders), str(CSRC / source)]


def main() -> None:
    """Compile everything, and exit with 1 at the first failure."""
    home = os.environ.get("CUDA_HOME")
    nvcc = Path(home, "bin", "nvcc") if home else Path(shutil.which("nvcc") or "nvcc")
    library = LIBRARIES["operators"]
    for source in (*library.device, *library.host):
        with tempfile.TemporaryDirectory() as folder:
            if subprocess.run(command(nvcc.resolve(), source), cwd=folder, check=False).returncode:
                sys.exit(f"{source} does not compile without a warning")
    print(f"compiled for {', '.join(ARCHITECTURES)}: no warning, no spill")


if __name__ == "__main__":
    main()
