"""The inputs of the compiled libraries: sources, flags, and the commands that build them.

The commands do not use ``torch.utils.cpp_extension``, which refuses CUDA sources if PyTorch was built for the CPU,
mistakes a wrapper script of nvcc for the toolkit, and imports setuptools.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from polyamp.backends.torch.building.architectures import gencode
from polyamp.backends.torch.building.toolchain import Nvcc, Toolchain

CSRC = Path(__file__).parents[1] / "csrc"

NVCC_FLAGS = ("-std=c++17", "-O3", "--fmad=false", "-lineinfo", "-Xcompiler=-fPIC,-fvisibility=hidden", "-Xptxas=-v")
"""No fused multiply-add and no fast math, so that GPU and CPU return the same bits. With -v ptxas reports registers."""

CXX_FLAGS = ("-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra")

_AFTERTHOUGHTS = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")  # environment variables that nvcc reads


@dataclass(frozen=True)
class Recipe:
    """The inputs of one library."""

    name: str  # name of the library
    host: tuple[str, ...]  # C++ sources
    device: tuple[str, ...] = ()  # CUDA sources, and the C++ sources that go with them; both are left out without nvcc
    flags: tuple[str, ...] = ()  # flags of the C++ compiler, in addition to `CXX_FLAGS`
    tied: str = ""  # what else the library depends on, such as one version of PyTorch
    folder: Path = CSRC  # folder of the sources; every header in it counts as used by all

    @property
    def file(self) -> str:
        """The library's file name."""
        return f"polyamp_{self.name}.so"

    @property
    def digest(self) -> str:
        """The hash of everything except compilers and architectures. Another digest means another library."""
        told = (self.name, self.host, self.device, self.flags, self.tied, NVCC_FLAGS, CXX_FLAGS, platform.machine())
        digest = hashlib.sha256(repr(told).encode())
        for path in sorted(self._read()):
            digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
        return digest.hexdigest()

    def _read(self) -> Iterator[Path]:
        yield from (self.folder / name for name in (*self.device, *self.host))
        yield from (path for path in self.folder.iterdir() if path.suffix in (".h", ".cuh"))


def operators() -> Recipe:
    """Return the recipe of ``torch.ops.polyamp.*``: one library for PyTorch 2.10 and later, through its stable ABI."""
    return Recipe(
        "operators",
        host=("arguments.cpp", "emulate.cpp", "operators.cpp", "binding_cpu.cpp"),
        device=("launch.cu", "binding_cuda.cpp"),
        flags=("-std=c++17", "-DTORCH_TARGET_VERSION=0x020a000000000000"),  # 2.10.0
    )


def autocast() -> Recipe:
    """Return the recipe of the boxed kernel of autocast's overrides, for one PyTorch version, whose C++ it calls."""
    # PyTorch 2.13 and later compile extensions with C++20; its headers support that since 2.10.
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return Recipe("autocast", host=("autocast.cpp",), flags=("-std=c++20", abi), tied=str(torch.__version__))


RECIPES = {"operators": operators, "autocast": autocast}


@dataclass(frozen=True)
class Job:
    """One build: a recipe, the compilers, and the GPU architectures, which are empty without nvcc."""

    recipe: Recipe
    toolchain: Toolchain
    architectures: tuple[str, ...]

    @classmethod
    def of(cls, recipe: Recipe, toolchain: Toolchain, architectures: Sequence[str]) -> Job:
        """Return the build of a recipe; without nvcc or CUDA sources it is for the CPU only."""
        if toolchain.nvcc and recipe.device:
            return cls(recipe, toolchain, tuple(architectures))
        return cls(recipe, replace(toolchain, nvcc=None), ())

    @property
    def key(self) -> str:
        """The hash of all inputs of the library."""
        added = [os.environ.get(name) for name in _AFTERTHOUGHTS]
        made = (self.recipe.digest, self.toolchain, self.architectures, added)
        return f"{self.recipe.name}-{hashlib.sha256(repr(made).encode()).hexdigest()[:20]}"

    @property
    def sources(self) -> tuple[str, ...]:
        """The files that are compiled."""
        return (*self.recipe.device, *self.recipe.host) if self.toolchain.nvcc else self.recipe.host

    def compile(self, source: str) -> list[str]:
        """Return the command that compiles a source to an object file, in the working directory."""
        paths = [str(self.recipe.folder / source), "-o", f"{source}.o"]
        nvcc = self.toolchain.nvcc
        if nvcc and source.endswith(".cu"):
            return [nvcc.path, "-c", *self._nvcc_flags(), *gencode(self.architectures), *paths]
        include = Path(torch.__file__).parent / "include"
        includes = ["-isystem", str(include), "-isystem", str(include / "torch/csrc/api/include")]
        return [*self.toolchain.cxx.command, "-c", *self.recipe.flags, *CXX_FLAGS, *includes, *paths]

    def link(self) -> list[str]:
        """Return the command that links the object files in the working directory to the library."""
        # The library does not search for PyTorch's own libraries when it is loaded, since they are loaded already.
        nvcc = self.toolchain.nvcc
        runtime = [f"-L{nvcc.libraries}", "-lcudart_static"] if nvcc else []
        torch_libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10"]
        libraries = ["-Wl,--as-needed", *torch_libraries, *runtime, "-ldl", "-lrt", "-lpthread", "-Wl,-z,defs"]
        objects = [f"{source}.o" for source in self.sources]
        return [*self.toolchain.cxx.command, "-shared", "-o", self.recipe.file, *objects, *libraries]

    def assembly(self, nvcc: Nvcc, source: str, output: str) -> list[str]:
        """Return the command that compiles a CUDA source to PTX, which has the kernels' parameter sizes."""
        return [nvcc.path, "-ptx", *self._nvcc_flags(), str(self.recipe.folder / source), "-o", output]

    def _nvcc_flags(self) -> list[str]:
        """Return flags for the same C++ compiler, if it is one word, and several architectures in parallel."""
        command = self.toolchain.cxx.command
        return [*NVCC_FLAGS, *([f"-ccbin={command[0]}"] if len(command) == 1 else []), "--threads=0"]
