"""The kernels on the CPU, with a fiber for each CUDA thread: a library of the operators, and programs that run them.

The sources are in ``tests/on_torch/kernels/native/fibers``; ``fiber.h`` describes them.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from polyamp.backends.torch import extension
from polyamp.backends.torch.extension import CSRC

NATIVE = Path(__file__).parents[1] / "on_torch/kernels/native"
FIBERS = NATIVE / "fibers"
FLAGS = ("-std=c++17", "-g", "-O1", "-ffp-contract=off", f"-I{CSRC}", f"-I{FIBERS}")
RACE = 66  # the exit code of a program in which ThreadSanitizer found a race


def operators_on_fibers(cache: Path) -> None:
    """Fill a ``POLYAMP_CACHE`` with operators that run on fibers; polyamp loads them as its own."""
    parts = extension.LIBRARIES["operators"]
    own = [CSRC / name for name in parts.host if name != "emulate.cpp"]
    include = Path(torch.__file__).parent / "include"
    includes = [f"-I{CSRC}", "-isystem", include, "-isystem", include / "torch/csrc/api/include"]
    flags = [*extension.CXX_FLAGS, *parts.flags, "-fPIC", *includes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYAMP_CACHE", str(cache))
        library = extension.path_of("operators")
    library.parent.mkdir(parents=True)
    sources = [*own, FIBERS / "device.cpp", FIBERS / "fiber.cpp"]
    linked = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10", "-ldl", "-lpthread"]
    _compiler("-shared", *flags, *sources, "-o", library, *linked)
    library.with_name(extension.BUILT).write_text("on fibers")


def races_program(folder: Path) -> Path:
    """Build the sanitizers' program on fibers, with ThreadSanitizer on the kernels only."""
    objects = [
        _object(folder, NATIVE / "sanitize.cpp"),
        _object(folder, FIBERS / "fiber.cpp", "-DPOLYAMP_RACES"),
        _object(folder, FIBERS / "device.cpp", "-fsanitize=thread"),
    ]
    return _link(folder / "races", objects, "-fsanitize=thread")


def look_for_races(program: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `races_program` until the first race, at fixed addresses, which ThreadSanitizer needs on many systems."""
    setarch = shutil.which("setarch")
    if setarch is None:
        pytest.fail("ThreadSanitizer's programs are run by setarch -R, which is not on PATH: install util-linux")
    done = run([setarch, "-R", program, "in brief"], TSAN_OPTIONS=f"halt_on_error=1 exitcode={RACE}", **environment)
    if "FATAL: ThreadSanitizer" in done.stderr or "setarch: " in done.stderr:
        pytest.fail(f"ThreadSanitizer does not run here:\n{done.stderr}")
    return done


def run(command: list[str | Path], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program, whatever its exit code."""
    told = {**os.environ, **environment}
    return subprocess.run(command, env=told, capture_output=True, text=True, check=False)


def _object(folder: Path, source: Path, *flags: str) -> Path:
    made = folder / f"{source.name}.o"
    _compiler("-c", *FLAGS, *flags, source, "-o", made)
    return made


def _link(program: Path, objects: list[Path], *flags: str) -> Path:
    _compiler(*flags, *objects, "-o", program, "-pthread")
    return program


def _compiler(*arguments: str | Path) -> None:
    done = run(["c++", *arguments])
    if done.returncode != 0:
        pytest.fail(f"the compiler cannot do {' '.join(map(str, arguments))}:\n{done.stderr}")
