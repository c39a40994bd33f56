"""The kernels on the CPU, with a fiber for each CUDA thread: a library of the operators, and programs that run them.

The sources are in ``tests/on_torch/kernels/native/fibers``; ``fiber.h`` describes them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from polyamp.backends.torch.building import builder, recipes, toolchain
from polyamp.backends.torch.building.recipes import CSRC, Job

NATIVE = Path(__file__).parents[1] / "on_torch/kernels/native"
FIBERS = NATIVE / "fibers"
FLAGS = ("-std=c++17", "-g", "-O1", "-ffp-contract=off", f"-I{CSRC}", f"-I{FIBERS}")
RACE = 66  # the exit code of a program in which ThreadSanitizer found a race


def operators_on_fibers(cache: Path) -> None:
    """Fill a ``POLYAMP_CACHE`` with operators that run on fibers; polyamp loads them as its own.

    Raises:
        ExtensionError: no compiler is found, or it fails.
    """
    own = recipes.operators()
    host = (*(name for name in own.host if name != "emulate.cpp"), "device.cpp", "fiber.cpp")
    recipe = replace(own, host=host, device=(), folder=_all_sources(cache / "sources"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYAMP_CACHE", str(cache))
        built = builder.build(Job.of(recipe, toolchain.find(cuda=False), ()))
    manifest = built.path.with_name(builder.MANIFEST)
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"digest": own.digest}))


def _all_sources(folder: Path) -> Path:
    """Make a folder with links to the sources of the kernels and of the fibers: a recipe has one folder."""
    folder.mkdir(parents=True)
    for source in (*CSRC.iterdir(), *FIBERS.iterdir()):
        (folder / source.name).symlink_to(source)
    return folder


def faults_program(folder: Path) -> Path:
    """Build the program of small correct and faulty kernels."""
    return _link(folder / "faults", [_object(folder, FIBERS / name) for name in ("faults.cpp", "fiber.cpp")])


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
    done = run([*toolchain.find_cxx().command, *arguments])
    if done.returncode != 0:
        pytest.fail(f"the compiler cannot do {' '.join(map(str, arguments))}:\n{done.stderr}")
