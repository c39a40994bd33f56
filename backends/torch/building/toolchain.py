"""Finds the compilers of this machine: NVIDIA's nvcc, and a C++ compiler, which nvcc needs too."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyamp.errors import ExtensionError

RUNTIME = "libcudart_static.a"
"""CUDA's runtime, linked statically: then a library works with a PyTorch built for another CUDA version."""

OLDEST = "12.1"
"""The first CUDA whose kernels take 32 KB of parameters (NVIDIA, CUDA 12.1 Release Notes), as polyamp's do."""


@dataclass(frozen=True)
class Cxx:
    """A C++ compiler: the words of its command, and its version text."""

    command: tuple[str, ...]
    version: str


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler: its path and version, the folder of CUDA's runtime, and the architectures it compiles for."""

    path: str
    version: str
    libraries: str
    knows: tuple[str, ...]


@dataclass(frozen=True)
class Toolchain:
    """The compilers of a build. Without nvcc it is a build for the CPU only."""

    cxx: Cxx
    nvcc: Nvcc | None

    @property
    def versions(self) -> str:
        """The versions as text, also to distinguish builds."""
        nvcc = [f"nvcc {self.nvcc.version}"] if self.nvcc else []
        return ", ".join([*nvcc, self.cxx.version])


def find(*, cuda: bool) -> Toolchain:
    """Return the compilers of this machine."""
    if sys.platform != "linux":
        raise ExtensionError(
            "the extension is built on Linux only",
            found=sys.platform,
            fix="go on without it: PyTorch's own kernels do the same work",
        )
    return Toolchain(find_cxx(), find_nvcc(nvcc_places()) if cuda else None)


def find_cxx() -> Cxx:
    """Return the compiler in ``CXX``, else g++, else c++."""
    named = os.environ.get("CXX")
    for command in [shlex.split(named)] if named else [["g++"], ["c++"]]:
        program = shutil.which(command[0])
        version = _output([program, *command[1:], "--version"]) if program else None
        if program and version:
            return Cxx((program, *command[1:]), version.splitlines()[0])
    raise ExtensionError(
        "no C++ compiler",
        found=f"CXX={named}, which does not run" if named else "neither g++ nor c++ on PATH",
        fix="install g++ (apt-get install g++), or name a compiler in CXX",
    )


def nvcc_places() -> Iterator[Path]:
    """Yield places of an nvcc: ``CUDA_HOME``, ``CUDA_PATH``, ``PATH``, ``/usr/local/cuda*``, NVIDIA's wheels."""
    homes = filter(None, map(os.environ.get, ("CUDA_HOME", "CUDA_PATH")))
    yield from (Path(home, "bin", "nvcc") for home in homes)
    on_path = shutil.which("nvcc")
    if on_path:
        yield Path(on_path)
    yield Path("/usr/local/cuda/bin/nvcc")
    yield from sorted(Path("/usr/local").glob("cuda-*/bin/nvcc"), reverse=True)
    yield from (folder / "nvcc" for folder in _wheels())


def _wheels() -> Iterator[Path]:
    """Yield the program folders of NVIDIA's wheels; each may have only some of nvcc, cuobjdump and nvdisasm."""
    wheels = importlib.util.find_spec("nvidia")  # of CUDA 13 and later: earlier ones have no nvcc
    for folder in (wheels.submodule_search_locations or ()) if wheels else ():
        yield from sorted(Path(folder).glob("cu*/bin"), reverse=True)


def find_nvcc(places: Iterator[Path]) -> Nvcc:
    """Return the first nvcc that runs, has headers and runtime, and compiles programs that this driver runs."""
    refused = []
    for place in dict.fromkeys(places):
        try:
            return _examined(place)
        except _Unusable as error:
            refused += [f"{place}: {error}"] if place.exists() else []
    raise ExtensionError(
        "no CUDA compiler (nvcc)",
        found="; ".join(refused) or "none in CUDA_HOME, on PATH, in /usr/local/cuda*, among NVIDIA's wheels",
        fix='pip install "polyamp[cuda-build]", or name a CUDA toolkit in CUDA_HOME',
    )


class _Unusable(Exception):
    """The reason why an nvcc cannot be used."""


def _examined(path: Path) -> Nvcc:
    version = re.search(r"V(\d+\.\d+\.\d+)", _output([str(path), "--version"]) or "")
    codes = re.findall(r"sm_(\d+)(\d)\b", _output([str(path), "--list-gpu-code"]) or "")
    if version is None or not codes:
        raise _Unusable("does not run")
    if _numbers(version[1]) < _numbers(OLDEST):
        raise _Unusable(f"CUDA {version[1]} is older than {OLDEST}")
    driver = driver_major()
    if driver is not None and driver < _numbers(version[1])[0]:  # NVIDIA, CUDA Compatibility
        raise _Unusable(f"CUDA {version[1]} needs a newer driver than this one, of CUDA {driver}")
    knows = sorted({(int(major), int(minor)) for major, minor in codes})
    return Nvcc(str(path), version[1], _runtime(path), tuple(f"{major}.{minor}" for major, minor in knows))


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _runtime(path: Path) -> str:
    """Return the folder of CUDA's runtime, from the toolkit that nvcc names: ``path`` may be a wrapper script."""
    dry = _output([str(path), "-dryrun", "-x", "cu", "-c", os.devnull]) or ""
    top = re.search(r"^#\$ TOP=(.*)$", dry, re.MULTILINE)
    home = Path(top[1].strip()) if top else path.parent.parent
    includes = [home / "include", *map(Path, re.findall(r'"-I([^"]+)"', dry)), Path("/usr/include")]
    if not any((folder / "cuda_runtime.h").exists() for folder in includes):
        raise _Unusable("has no cuda_runtime.h next to it")
    folders = [home / "lib64", home / "lib", *map(Path, re.findall(r'"-L([^"]+)"', dry)), *_system_libraries()]
    found = next((folder for folder in folders if (folder / RUNTIME).exists()), None)
    if found is None:
        raise _Unusable(f"has no {RUNTIME} next to it")
    return os.path.realpath(found)


def _system_libraries() -> Iterator[Path]:
    """Yield the folders of a distribution's own CUDA packages."""
    yield from sorted(Path("/usr/lib").glob("*-linux-gnu"))
    yield Path("/usr/lib64")


def driver_major() -> int | None:
    """Return the major CUDA version of this machine's driver; None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    refused = driver.cuDriverGetVersion(ctypes.byref(version))  # does not start CUDA
    return None if refused else version.value // 1000


def tool(name: str, toolchain: Toolchain) -> str | None:
    """Return the path of a CUDA program: next to nvcc, on ``PATH``, or in NVIDIA's wheels."""
    given = [Path(toolchain.nvcc.path)] if toolchain.nvcc else []
    folders = [str(place.parent) for place in (*given, *nvcc_places())]
    return shutil.which(name, path=os.pathsep.join([*folders, os.environ.get("PATH", "")]))


def _output(command: Sequence[str]) -> str | None:
    """Return a program's output; None if it does not run."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout
