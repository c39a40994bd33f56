"""The output of commands: the text of reports, and JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from polyamp.errors import InvalidValueError
from polyamp.report import Report, write_json

STDOUT = "-"


def check_file(json_file: str | None) -> None:
    """Refuse a file that `show` could not write, before a command that takes long."""
    if json_file in (None, STDOUT):
        return
    path = Path(json_file)
    if path.is_dir() or not path.parent.is_dir():
        raise InvalidValueError(
            "the file cannot be written",
            where="--json or --report",
            found=f"{path} is a folder" if path.is_dir() else f"there is no folder {path.parent}",
            allowed="a file in a folder that exists",
            fix="make the folder first, or name another file",
        )


@contextmanager
def printing_elsewhere(json_file: str | None) -> Iterator[None]:
    """Send what the user's code prints to standard error, if standard output is for JSON."""
    with redirect_stdout(sys.stderr) if json_file == STDOUT else nullcontext():
        yield


def show(reports: Sequence[Report], values: Mapping[str, Any], json_file: str | None) -> None:
    """Print reports and write their JSON; ``-`` is standard output, and then nothing else is printed there."""
    if json_file == STDOUT:
        print(json.dumps(values, indent=1, allow_nan=False))
        return
    print(*reports, sep="\n\n")
    if json_file is not None:
        write_json(values, json_file)
