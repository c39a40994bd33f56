"""Read the Python files of a command line, and write a converted file in one step with its permissions."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from polyamp.errors import InvalidValueError
from polyamp.migration.convert import migrate_source
from polyamp.migration.report import Migration

_SKIPPED = {".git", ".hg", ".tox", ".venv", "venv", "__pycache__", "node_modules", "build", "site-packages"}


def python_files(targets: Iterable[str]) -> Iterator[Path]:
    """Yield the files, and in order the ``*.py`` files below each folder.

    Raises:
        InvalidValueError: a file or folder does not exist.
    """
    for target in map(Path, targets):
        if target.is_dir():
            yield from sorted(path for path in target.rglob("*.py") if _is_program(path.relative_to(target), path))
        elif target.is_file():
            yield target
        else:
            raise InvalidValueError(
                "there is no such file",
                where="polyamp migrate",
                found=str(target),
                fix="name files or folders that exist",
            )


def _is_program(relative: Path, path: Path) -> bool:
    return path.is_file() and not _SKIPPED.intersection(relative.parts[:-1])


def migrate_file(path: Path) -> Migration:
    """Convert one file without writing it."""
    try:
        source = path.read_bytes()
    except OSError as error:
        return Migration(str(path), b"", b"", failure=f"not read: {error.strerror}")
    return migrate_source(source, str(path))


def write(migration: Migration) -> None:
    """Replace a file by its conversion: all of it or nothing, with the permissions that it has.

    Raises:
        InvalidValueError: the file cannot be written, or it changed after it was read.
    """
    path = Path(os.path.realpath(migration.path))  # a link stays a link
    try:
        if path.read_bytes() != migration.before:
            raise _unwritten(migration.path, "it changed while polyamp read it")
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(migration.after)
            os.chmod(name, stat.S_IMODE(path.stat().st_mode))
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _unwritten(migration.path, str(error)) from error


def _unwritten(path: str, found: str) -> InvalidValueError:
    return InvalidValueError(
        "the file cannot be written",
        where=path,
        found=found,
        fix="nothing in it was changed; run polyamp migrate again",
    )
