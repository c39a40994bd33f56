"""Importing polyamp imports no framework and is quick; a framework that is missing is an error that names its extra."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import polyamp
from polyamp import registry

FRAMEWORKS = ["torch", "jax", "jaxlib", "optax", "flax", "equinox", "tensorflow", "keras"]
NEVER_IMPORTED = [*FRAMEWORKS, "numpy", "rich", "typer", "matplotlib", "sklearn", "scipy", "importlib.metadata"]
PACKAGE = Path(polyamp.__file__).parent

LOOK = "import sys, polyamp; print(*sorted(set(sys.argv[1:]) & set(sys.modules)))"

CLOCK = "import time; start = time.perf_counter(); import polyamp; print(time.perf_counter() - start)"

BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
import polyamp
MODULE = "polyamp.backends."
try:
    %s
except polyamp.MissingFrameworkError as error:
    print(error)
"""


def run(code: str, *arguments: str, path: Path | None = None) -> str:
    environment = {**os.environ, **({"PYTHONPATH": str(path)} if path else {})}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=environment, cwd=path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The package without its adapters, in a folder of its own, to be broken."""
    shutil.copytree(PACKAGE, tmp_path / "polyamp", ignore=shutil.ignore_patterns("backends", "__pycache__"))
    return tmp_path


def test_import_loads_nothing_heavy() -> None:
    assert run(LOOK, *NEVER_IMPORTED).split() == []


def test_the_check_sees_a_planted_import(copied: Path) -> None:
    with (copied / "polyamp" / "formats.py").open("a") as source:
        source.write("\nimport importlib.metadata\n")
    assert run(LOOK, *NEVER_IMPORTED, path=copied).split() == ["importlib.metadata"]


def test_import_takes_less_than_50_ms() -> None:
    assert statistics.median(float(run(CLOCK)) for _ in range(7)) < 0.050


@pytest.mark.parametrize("framework", ["torch", "jax", "tensorflow", "keras"])
@pytest.mark.parametrize("call", ["polyamp.wrap_optimizer(3, backend=sys.argv[1])", "__import__(MODULE + sys.argv[1])"])
def test_missing_framework_names_the_extra(framework: str, call: str) -> None:
    said = run(BLOCK % call, framework)
    assert f"{framework} is not installed" in said
    assert f'pip install "polyamp[{framework}]"' in said


def test_two_adapters_for_one_framework_are_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\nmxnet = {name}:adapter\n")
    code = "import polyamp\ntry: polyamp.registry.entries()\nexcept polyamp.PolyampError as error: print(error)"
    said = run(code, path=tmp_path)
    assert "two adapters for the same framework" in said
    assert "one:adapter" in said
    assert "two:adapter" in said
