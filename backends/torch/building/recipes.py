"""What the compiled libraries are made of: sources, flags, and the commands that make a library of them.

These commands do without ``torch.utils.cpp_extension``, which refuses CUDA sources where PyTorch was built for the CPU,
takes a script around nvcc for the toolkit, and imports setuptools.
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
"""No fused multiply-add, and no fast math: GPU and CPU give the same bits. With -v the assembler tells registers."""

CXX_FLAGS = ("-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra")

_AFTERTHOUGHTS = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")  # environment variables that nvcc reads


@dataclass(frozen=True)
class Recipe:
    """What one library is made of.

    >>> Recipe("twice", host=("twice.cpp",), flags=("-std=c++17",)).file
    'polyamp_twice.so'

    Args:
        name: of the library.
        host: C++ sources.
        device: CUDA sources, and the C++ sources that go with them; both left out where there is no nvcc.
        flags: of the C++ compiler, beside `CXX_FLAGS`.
        tied: to what the library is bound beside its sources and flags, such as one version of PyTorch.
        folder: of the sources; every header in it counts as read by all.
    """

    name: str
    host: tuple[str, ...]
    device: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    tied: str = ""
    folder: Path = CSRC

    @property
    def file(self) -> str:
        """The library's file name."""
        return f"polyamp_{self.name}.so"

    @property
    def digest(self) -> str:
        """Of everything but compilers and architectures: what has another digest is another library."""
        told = (self.name, self.host, self.device, self.flags, self.tied, NVCC_FLAGS, CXX_FLAGS, platform.machine())
        digest = hashlib.sha256(repr(told).encode())
        for path in sorted(self._read()):
            digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
        return digest.hexdigest()

    def _read(self) -> Iterator[Path]:
        yield from (self.folder / name for name in (*self.device, *self.host))
        yield from (path for path in self.folder.iterdir() if path.suffix in (".h", ".cuh"))


def operators() -> Recipe:
    """``torch.ops.polyamp.*``: one library for every PyTorch from 2.10 on, by its stable ABI.

    >>> operators().tied
    ''
    """
    return Recipe(
        "operators",
        host=("arguments.cpp", "emulate.cpp", "operators.cpp", "binding_cpu.cpp"),
        device=("launch.cu", "binding_cuda.cpp"),
        flags=("-std=c++17", "-DTORCH_TARGET_VERSION=0x020a000000000000"),  # 2.10.0
    )


def autocast() -> Recipe:
    """The boxed kernel of autocast's overrides: bound to one version of PyTorch, whose C++ it calls.

    PyTorch 2.13 and later compile extensions with C++20, which the headers since 2.10 are fit for.

    >>> autocast().tied == torch.__version__
    True
    """
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return Recipe("autocast", host=("autocast.cpp",), flags=("-std=c++20", abi), tied=str(torch.__version__))


RECIPES = {"operators": operators, "autocast": autocast}


@dataclass(frozen=True)
class Job:
    """One build: a recipe, the compilers, and the GPU architectures, of which there are none without nvcc.

    >>> from polyamp.backends.torch.building.toolchain import Cxx
    >>> job = Job.of(Recipe("twice", host=("twice.cpp",)), Toolchain(Cxx(("g++",), ""), None), ("9.0",))
    >>> job.compile("twice.cpp")[:2], job.architectures
    (['g++', '-c'], ())
    """

    recipe: Recipe
    toolchain: Toolchain
    architectures: tuple[str, ...]

    @classmethod
    def of(cls, recipe: Recipe, toolchain: Toolchain, architectures: Sequence[str]) -> Job:
        """The build of a recipe; without nvcc, or without CUDA sources, it is one for the CPU alone."""
        if toolchain.nvcc and recipe.device:
            return cls(recipe, toolchain, tuple(architectures))
        return cls(recipe, replace(toolchain, nvcc=None), ())

    @property
    def key(self) -> str:
        """The hash of all that goes into the library."""
        added = [os.environ.get(name) for name in _AFTERTHOUGHTS]
        made = (self.recipe.digest, self.toolchain, self.architectures, added)
        return f"{self.recipe.name}-{hashlib.sha256(repr(made).encode()).hexdigest()[:20]}"

    @property
    def sources(self) -> tuple[str, ...]:
        """The files that are compiled."""
        return (*self.recipe.device, *self.recipe.host) if self.toolchain.nvcc else self.recipe.host

    def compile(self, source: str) -> list[str]:
        """The command that makes an object file of a source, in the working directory."""
        paths = [str(self.recipe.folder / source), "-o", f"{source}.o"]
        nvcc = self.toolchain.nvcc
        if nvcc and source.endswith(".cu"):
            return [nvcc.path, "-c", *self._nvcc_flags(), *gencode(self.architectures), *paths]
        include = Path(torch.__file__).parent / "include"
        includes = ["-isystem", str(include), "-isystem", str(include / "torch/csrc/api/include")]
        return [*self.toolchain.cxx.command, "-c", *self.recipe.flags, *CXX_FLAGS, *includes, *paths]

    def link(self) -> list[str]:
        """The command that makes the library of the object files in the working directory.

        PyTorch's own libraries are not searched for when it is loaded: they are there before it.
        """
        nvcc = self.toolchain.nvcc
        runtime = [f"-L{nvcc.libraries}", "-lcudart_static"] if nvcc else []
        torch_libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10"]
        libraries = ["-Wl,--as-needed", *torch_libraries, *runtime, "-ldl", "-lrt", "-lpthread", "-Wl,-z,defs"]
        objects = [f"{source}.o" for source in self.sources]
        return [*self.toolchain.cxx.command, "-shared", "-o", self.recipe.file, *objects, *libraries]

    def assembly(self, nvcc: Nvcc, source: str, output: str) -> list[str]:
        """The command that makes PTX of a CUDA source, which says how many bytes of parameters its kernels take."""
        return [nvcc.path, "-ptx", *self._nvcc_flags(), str(self.recipe.folder / source), "-o", output]

    def _nvcc_flags(self) -> list[str]:
        """With the same C++ compiler, where that is one word, and several architectures at once."""
        command = self.toolchain.cxx.command
        return [*NVCC_FLAGS, *([f"-ccbin={command[0]}"] if len(command) == 1 else []), "--threads=0"]
