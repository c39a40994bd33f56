"""What is built is what is in the tree, and the project's files agree with each other."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement

import polyamp

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BACKENDS = sorted(path.parent.name for path in (ROOT / "backends").glob("*/__init__.py"))
HOUSE = ("polyamp", "backends", "tests", "examples", "benchmarks", "docs")
LINKS = {"backends", "examples"}
SOURCES = {
    *(
        str(path.relative_to(ROOT))
        for path in (ROOT / "polyamp").rglob("*.py")
        if not {"backends", "examples"} & set(path.parts)
    ),
    *(f"polyamp/{path.relative_to(ROOT)}" for path in (ROOT / "backends").rglob("*.py")),
    *(f"polyamp/{path.relative_to(ROOT)}" for path in (ROOT / "backends").rglob("csrc/*")),
    *(f"polyamp/{path.relative_to(ROOT)}" for path in (ROOT / "examples").glob("*.py")),
}
SUFFIXES = (".py", ".h", ".cuh", ".cu", ".cpp")
pytestmark = pytest.mark.once


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What a build reads."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("polyamp", "backends", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def build(tree: Path, kind: str) -> Path:
    code = f"from setuptools import build_meta; build_meta.build_{kind}('dist')"
    subprocess.run([sys.executable, "-P", "-c", code], cwd=tree, check=True, capture_output=True)
    return next((tree / "dist").iterdir())


def wheel_files(tree: Path) -> set[str]:
    return set(zipfile.ZipFile(build(tree, "wheel")).namelist())


@pytest.mark.slow
def test_wheel_has_every_source_the_types_the_licence_and_nothing_else(tree: Path) -> None:
    wheel, info = zipfile.ZipFile(build(tree, "wheel")), f"polyamp-{polyamp.__version__}.dist-info"
    files = {name for name in wheel.namelist() if not name.startswith(f"{info}/")}
    assert files == {*SOURCES, "polyamp/py.typed"}
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
    described = Metadata.from_email(wheel.read(f"{info}/METADATA"), validate=True)
    assert str(described.version) == polyamp.__version__
    assert described.description == (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_wheel_of_the_sdist_of_a_checkout_without_links_is_the_same(
    tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for link in LINKS:
        (tree / "polyamp" / link).unlink()
    unpacked = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build(tree, "sdist")) as archive:
        archive.extractall(unpacked, filter="data")
    assert wheel_files(next(unpacked.iterdir())) >= SOURCES


@pytest.mark.slow
def test_the_check_sees_a_package_that_is_not_listed(tree: Path) -> None:
    settings = (tree / "pyproject.toml").read_text()
    (tree / "pyproject.toml").write_text(settings.replace('    "polyamp.backends.torch",\n', ""))
    missing = SOURCES - wheel_files(tree)
    assert missing
    assert all(name.startswith("polyamp/backends/torch/") for name in missing)


def test_the_version_is_written_in_one_place() -> None:
    names = ("pyproject.toml", "README.md", ".mkdocs.yml", ".ci/*", ".github/*.*", "docs/start/*.md", "polyamp/*.py")
    files = [path for name in names for path in ROOT.glob(name)]
    assert [path.name for path in files if polyamp.__version__ in path.read_text()] == ["version.py"]


def test_pre_commit_runs_the_ruff_of_the_tests() -> None:
    (pinned,) = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("ruff=="))
    assert f"rev: v{pinned.partition('==')[2]}\n" in (ROOT / ".pre-commit-config.yaml").read_text()


def test_link_to_the_backends_is_relative() -> None:
    assert (ROOT / "polyamp" / "backends").readlink() == Path("../backends")


@pytest.mark.parametrize("name", BACKENDS)
def test_every_adapter_has_an_entry_point_and_an_extra(name: str) -> None:
    assert PROJECT["project"]["entry-points"]["polyamp.backends"][name] == f"polyamp.backends.{name}:adapter"
    assert name in PROJECT["project"]["optional-dependencies"]


@pytest.mark.parametrize("name", BACKENDS)
def test_no_folder_shadows_a_framework(name: str) -> None:
    folders = [path for top in HOUSE for path in (ROOT / top).rglob(name) if path.is_dir()]
    assert {path.resolve() for path in folders} == {ROOT / "backends" / name}


def test_every_requirement_has_a_tested_version() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {Requirement(line.partition("#")[0]).name for line in lines if line.partition("#")[0].strip()}
    extras = PROJECT["project"]["optional-dependencies"].values()
    required = {Requirement(text).name for texts in (PROJECT["project"]["dependencies"], *extras) for text in texts}
    assert required - pinned == {"polyamp"}  # the extra `all` names the others


def test_ci_runs_the_test_command_of_the_readme() -> None:
    script = ROOT / ".ci" / "run"
    commands = [line for line in script.read_text().splitlines() if line.startswith("python -m venv")]
    assert os.access(script, os.X_OK)
    assert len(commands) == 1
    assert commands[0] in (ROOT / "README.md").read_text().splitlines()
