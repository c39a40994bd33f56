"""What is built is what is in the tree, and the linters that guard the structure see a planted violation."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BACKENDS = sorted(path.parent.name for path in (ROOT / "backends").glob("*/__init__.py"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = {".git", ".tox", "build", "polyamp.egg-info"}
    source.mkdir()
    for path in ROOT.iterdir():
        if path.name in {"polyamp", "backends", "pyproject.toml", "README.md", "LICENSE"} - ignored:
            subprocess.run(["cp", "-R", path, source], check=True)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, source]
    subprocess.run(build, check=True)
    return next(folder.glob("*.whl"))


def test_every_backend_is_in_the_project_and_in_the_wheel(wheel: Path) -> None:
    assert BACKENDS == ["jax", "keras", "tensorflow", "torch"]
    packages = PROJECT["tool"]["setuptools"]["packages"]
    files = set(zipfile.ZipFile(wheel).namelist())
    for name in BACKENDS:
        assert f"polyamp.backends.{name}" in packages
        for source in (ROOT / "backends" / name).glob("*.py"):
            assert f"polyamp/backends/{name}/{source.name}" in files


def test_wheel_ships_types_and_licence_and_only_polyamp(wheel: Path) -> None:
    files = zipfile.ZipFile(wheel).namelist()
    assert "polyamp/py.typed" in files
    assert any(name.endswith("licenses/LICENSE") for name in files)
    assert {name.split("/")[0].split("-")[0] for name in files} == {"polyamp"}


def test_version_stands_once() -> None:
    import polyamp

    assert polyamp.__version__ == PROJECT["project"]["version"]


def test_link_to_the_backends_is_relative() -> None:
    assert (ROOT / "polyamp" / "backends").readlink() == Path("../backends")


def test_every_adapter_is_an_entry_point_and_an_extra() -> None:
    entries = PROJECT["project"]["entry-points"]["polyamp.backends"]
    for name in BACKENDS:
        assert entries[name] == f"polyamp.backends.{name}:adapter"
        assert name in PROJECT["project"]["optional-dependencies"]


def test_ci_runs_the_readme_test_command() -> None:
    script, readme = (ROOT / ".ci" / "run").read_text(), (ROOT / "README.md").read_text()
    command = next(line for line in readme.splitlines() if line.startswith("python -m venv .venv-test"))
    assert command in script


def test_no_folder_shadows_a_framework() -> None:
    shadows = [path for name in BACKENDS for path in ROOT.glob(f"[!.]*/**/{name}") if path.is_dir()]
    assert {path.parent.resolve() for path in shadows} == {ROOT / "backends"}
