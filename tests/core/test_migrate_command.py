"""`polyamp migrate`: what it prints, its exit codes, and how it writes files."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import polyamp
from polyamp import cli
from polyamp.commands import migrate as command
from polyamp.migration import files

OLD = "import torch\n\nwith torch.cuda.amp.autocast():\n    train()\n"
NEW = 'import polyamp\n\nwith polyamp.autocast("mixed_float16"):\n    train()\n'
REFUSED = "import jmp\nscale = jmp.NoOpLossScale()\n"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["migrate", *map(str, arguments)])


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(OLD)
    return path


def test_the_diff_is_printed_and_nothing_is_written(program: Path) -> None:
    done = run(program)
    assert done.exit_code == 0, done.output
    assert "-with torch.cuda.amp.autocast():" in done.output
    assert '+with polyamp.autocast("mixed_float16"):' in done.output
    assert done.output.endswith("1 converted\n")
    assert program.read_text() == OLD


def test_write_converts_the_file_once(program: Path) -> None:
    program.chmod(0o750)
    assert run(program, "--write").exit_code == 0
    assert program.read_text() == NEW
    assert stat.S_IMODE(program.stat().st_mode) == 0o750
    assert [path.name for path in program.parent.iterdir()] == ["train.py"]
    again = run(program, "--write")
    assert (again.exit_code, program.read_text()) == (0, NEW)
    assert again.output == "1 with nothing to convert\n"


@pytest.mark.parametrize(
    "encoded", [OLD.replace("\n", "\r\n").encode(), f"# -*- coding: latin-1 -*-\n# é\n{OLD}".encode("latin-1")]
)
def test_write_keeps_line_endings_and_encoding(program: Path, encoded: bytes) -> None:
    program.write_bytes(encoded)
    assert run(program, "--write").exit_code == 0
    expected = encoded.replace(b"import torch", b"import polyamp")
    assert program.read_bytes() == expected.replace(b"torch.cuda.amp.autocast()", b'polyamp.autocast("mixed_float16")')


def test_a_refused_file_is_left_and_its_places_are_listed(program: Path) -> None:
    other = program.with_name("other.py")
    other.write_text(REFUSED)
    done = run(program.parent, "--write")
    assert done.exit_code == command.DECIDE == 3
    assert (program.read_text(), other.read_text()) == (NEW, REFUSED)
    assert f"{other}:2: jmp.NoOpLossScale" in done.output
    assert "    write: polyamp.wrap_optimizer(tx, policy)" in done.output


def test_a_comment_to_look_at_needs_a_person(program: Path) -> None:
    program.write_text("import torch\nwith torch.autocast(device):\n    pass\n")
    assert run(program, "--write").exit_code == 3
    assert "# polyamp:" in program.read_text()
    assert run(program).exit_code == 0


def test_json_has_every_file(program: Path) -> None:
    other = program.with_name("other.py")
    other.write_text(REFUSED)
    done = run(program, other, "--json")
    found = json.loads(done.output)
    assert [one["outcome"] for one in found["files"]] == ["converted", "refused"]
    assert found["files"][0]["diff"].startswith(f"--- a/{program}")
    assert found["files"][1]["refused"][0]["line"] == 2
    assert found["written"] == []


def test_folders_are_walked_without_other_peoples_packages(program: Path) -> None:
    hidden = program.parent / "venv" / "lib"
    hidden.mkdir(parents=True)
    (hidden / "apex.py").write_text(OLD)
    (program.parent / "notes.txt").write_text(OLD)
    assert [path.name for path in files.python_files([str(program.parent)])] == ["train.py"]


def test_a_link_stays_a_link(program: Path) -> None:
    link = program.with_name("link.py")
    link.symlink_to(program)
    assert run(link, "--write").exit_code == 0
    assert link.is_symlink()
    assert program.read_text() == NEW


def test_a_file_that_changed_meanwhile_is_not_written(program: Path) -> None:
    migration = files.migrate_file(program)
    program.write_text("x = 1\n")
    with pytest.raises(polyamp.InvalidValueError, match="changed while"):
        files.write(migration)
    assert program.read_text() == "x = 1\n"


def test_a_write_that_fails_leaves_the_file(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(files.os, "replace", fails)
    with pytest.raises(polyamp.InvalidValueError, match="no space"):
        files.write(files.migrate_file(program))
    assert program.read_text() == OLD
    assert [path.name for path in program.parent.iterdir()] == ["train.py"]


def test_a_missing_file_and_a_missing_libcst_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = run(tmp_path / "nonesuch.py")
    assert isinstance(missing.exception, polyamp.InvalidValueError)
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    without = run(tmp_path)
    assert isinstance(without.exception, polyamp.MissingFrameworkError)
    assert 'pip install "polyamp[migrate]"' in str(without.exception)
