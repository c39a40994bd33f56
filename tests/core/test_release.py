"""A release is refused while it is not one; the images are made of what there is."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import polyamp

ROOT = Path(__file__).parents[2]
VERSION = polyamp.__version__
pytestmark = pytest.mark.once


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository of what the script checks before it builds, all of it committed."""
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    for name in ("CHANGELOG.md", "pyproject.toml", "polyamp/version.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def git(tree: Path, *arguments: str) -> None:
    author = ("-c", "user.name=author", "-c", "user.email=author@example.org")
    subprocess.run(["git", *author, *arguments], cwd=tree, check=True)


def commit(tree: Path) -> None:
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message=what there is")


def begin_changes(tree: Path, heading: str) -> None:
    (tree / "CHANGELOG.md").write_text(f"# Changes\n\n{heading}\n")
    commit(tree)


def refusal(tree: Path, *options: str) -> str:
    done = subprocess.run([tree / ".ci" / "release", *options], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "  to do:   " in done.stderr
    return done.stderr


def test_changes_that_are_not_committed_are_refused(tree: Path) -> None:
    (tree / "new.py").touch()
    assert "not committed" in refusal(tree)


def test_a_version_that_has_a_tag_is_refused(tree: Path) -> None:
    git(tree, "tag", f"v{VERSION}")
    assert f"the tag v{VERSION} exists" in refusal(tree)


@pytest.mark.parametrize("heading", ["", "## 9.9.9, 2026-01-01", f"## {VERSION}0, 2026-01-01"])
def test_a_version_without_its_section_of_changes_is_refused(tree: Path, heading: str) -> None:
    begin_changes(tree, heading)
    assert f"CHANGELOG.md begins with '{heading}'" in refusal(tree)


def test_an_upload_without_a_date_or_an_address_of_the_source_is_refused(tree: Path) -> None:
    begin_changes(tree, f"## {VERSION}, not yet released")
    assert "has no date" in refusal(tree, "--upload")
    begin_changes(tree, f"## {VERSION}, 2026-01-01")
    project = (tree / "pyproject.toml").read_text()
    (tree / "pyproject.toml").write_text(re.sub("(?m)^Source = .*$", "", project) + "\n")
    commit(tree)
    assert "where the source is" in refusal(tree, "--upload")


def test_an_unknown_option_is_refused(tree: Path) -> None:
    assert "unknown option --publish" in refusal(tree, "--publish")


@pytest.mark.parametrize("image", ["cpu", "cuda"])
def test_an_image_has_what_a_build_reads_and_the_versions_of_the_tests(image: str) -> None:
    lines = (ROOT / ".ci" / f"{image}.Dockerfile").read_text().splitlines()
    copied = {name for line in lines if line.startswith("COPY ") and "--" not in line for name in line.split()[1:-1]}
    assert copied == {"constraints.txt", "pyproject.toml", "README.md", "LICENSE", "polyamp", "backends", "examples"}
    installed = [line for line in lines if "pip install" in line]
    extras = {name for line in installed for name in re.findall(r'"\.\[(.*)\]"', line)[0].split(",")}
    assert extras <= tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    assert all(" -c constraints.txt " in line for line in installed)
