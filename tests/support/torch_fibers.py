"""The kernels on the CPU with each CUDA thread a fiber: the operators' library of them, and programs that run them.

The sources are in ``tests/on_torch/kernels/native/fibers``; see ``fiber.h``.
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

FIBERS = Path(__file__).parents[1] / "on_torch/kernels/native/fibers"
FLAGS = ["-std=c++17", "-g", "-O1", "-ffp-contract=off", "-I", str(CSRC), "-I", str(FIBERS)]


def operators_on_fibers(cache: Path) -> None:
    """Fill a ``POLYAMP_CACHE`` with operators whose CPU is the fibers; for polyamp they are those of its own sources.

    Raises:
        ExtensionError: no compiler is found, or it fails.
    """
    own = recipes.operators()
    sources = _linked(cache / "sources")
    host = [*(name for name in own.host if name != "emulate.cpp"), "device.cpp", "fiber.cpp"]
    job = Job.of(replace(own, host=tuple(host), device=(), folder=sources), toolchain.find(cuda=False), ())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYAMP_CACHE", str(cache))
        manifest = builder.build(job).path.with_name(builder.MANIFEST)
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"digest": own.digest}))


def _linked(folder: Path) -> Path:
    """A folder with all sources, as a recipe wants them."""
    folder.mkdir(parents=True)
    for source in (*CSRC.iterdir(), *FIBERS.iterdir()):
        (folder / source.name).symlink_to(source)
    return folder
