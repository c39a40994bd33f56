"""Imports have no circle, and the linters that hold who may import whom each catch a planted violation.

That the linters pass on the tree as it is, is tox's environment ``lint``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMPORT_LINTER = ("lint-imports", "--no-cache")
RUFF = ("ruff", "check", "--no-cache", "--select=TID", "--output-format=concise")
pytestmark = pytest.mark.once


def lint(command: tuple[str, ...], tree: Path) -> tuple[bool, str]:
    """Whether the linter passes, and what it says."""
    program = Path(sys.executable).with_name(command[0])
    done = subprocess.run([program, *command[1:]], cwd=tree, capture_output=True, text=True, check=False)
    return done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The sources and their settings, to be broken."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for folder in ("polyamp", "backends"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def plant(tree: Path, file: str, code: str) -> None:
    with (tree / file).open("a") as source:
        source.write(f"\n\n{code}\n")


@pytest.mark.parametrize(
    ("file", "code", "chain"),
    [
        ("polyamp/formats.py", "import torch", "polyamp.formats -> torch"),
        ("polyamp/verbs.py", "def late():\n    import jax", "polyamp.verbs -> jax"),
        ("polyamp/policies.py", "import polyamp.backends.jax", "polyamp.policies -> polyamp.backends.jax"),
        ("backends/keras/casting.py", "import polyamp.backends.jax", "polyamp.backends.keras -> polyamp.backends.jax"),
        ("backends/torch/casting.py", "import tensorflow", "polyamp.backends.torch -> tensorflow"),
        ("backends/jax/steps/skipping.py", "import torch", "polyamp.backends.jax -> torch"),
        ("backends/tensorflow/casting.py", "import keras", "polyamp.backends.tensorflow -> keras"),
    ],
)
def test_import_linter_sees_a_planted_import(tree: Path, file: str, code: str, chain: str) -> None:
    plant(tree, file, code)
    passes, said = lint(IMPORT_LINTER, tree)
    importer, imported = chain.split(" -> ")
    assert not passes
    assert f"{importer} is not allowed to import {imported}" in " ".join(said.split())


@pytest.mark.parametrize(
    ("file", "code", "rule"),
    [
        ("polyamp/formats.py", "import torch", "TID253"),
        ("polyamp/loss_scale.py", "from jax import numpy", "TID253"),
        ("backends/torch/casting.py", "import backends.jax", "TID251"),
        ("polyamp/rules.py", "def late():\n    from backends import keras", "TID251"),
    ],
)
def test_ruff_sees_a_planted_import(tree: Path, file: str, code: str, rule: str) -> None:
    plant(tree, file, code)
    passes, said = lint(RUFF, tree)
    assert not passes
    assert rule in said


@pytest.mark.parametrize(
    ("docstring", "rule"),
    [
        ("Returns it.", "D401"),
        ("Return it", "D400"),
        ("This returns it.", "D404"),
        ("Return it,\n    and more.", "D205"),
    ],
)
@pytest.mark.parametrize("file", ["polyamp/formats.py", "backends/torch/casting.py", "backends/jax/steps/gradients.py"])
def test_ruff_sees_a_planted_docstring(tree: Path, file: str, docstring: str, rule: str) -> None:
    plant(tree, file, f'def late() -> None:\n    """{docstring}"""')
    passes, said = lint(("ruff", "check", "--no-cache", f"--select={rule}", "--output-format=concise"), tree)
    assert not passes
    assert rule in said


CIRCLES = """
import json, re, grimp
found = grimp.build_graph("polyamp", cache_dir=None)
for module in [one for one in found.modules if one.endswith(".adapter")]:
    source = open(module.replace(".", "/") + ".py").read()
    for late in re.findall(r'"(polyamp[.\\w]+):\\w+"', source):  # verbs of an adapter's table that are imported later
        found.add_import(importer=module, imported=late)
imports = {module: found.find_modules_directly_imported_by(module) for module in found.modules}
inside = [one for one in imports if any(found.chain_exists(importer=other, imported=one) for other in imports[one])]
print(json.dumps(sorted(inside)))
"""


def in_circles(tree: Path) -> set[str]:
    """The modules that import themselves through others, by imports in functions and for types as well."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, "-P", "-c", CIRCLES]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_imports_have_no_circle() -> None:
    assert in_circles(ROOT) == set()


@pytest.mark.parametrize(
    ("file", "code", "modules"),
    [
        ("polyamp/formats.py", "def late():\n    import polyamp.loss_scale", {"formats", "loss_scale"}),
        ("polyamp/rules.py", "if TYPE_CHECKING:\n    from polyamp.policies import Policy", {"rules", "policies"}),
        (
            "backends/torch/casting.py",
            "from polyamp.backends.torch.adapter import adapter",
            {"backends.torch.casting", "backends.torch.adapter"},
        ),
    ],
)
def test_a_planted_circle_is_seen(tree: Path, file: str, code: str, modules: set[str]) -> None:
    plant(tree, file, code)
    assert in_circles(tree) >= {f"polyamp.{module}" for module in modules}
