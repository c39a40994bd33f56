"""The linters that hold who may import whom are each seen to catch a planted violation.

That they pass on the tree as it is, is tox's environment ``lint``.
"""

from __future__ import annotations

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
        ("polyamp/policy.py", "import polyamp.backends.jax", "polyamp.policy -> polyamp.backends.jax"),
        ("backends/keras/casting.py", "import polyamp.backends.jax", "polyamp.backends.keras -> polyamp.backends.jax"),
        ("backends/torch/casting.py", "import tensorflow", "polyamp.backends.torch -> tensorflow"),
        ("backends/jax/steps/trees.py", "import torch", "polyamp.backends.jax -> torch"),
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
