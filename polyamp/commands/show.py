"""The output of commands: the text of reports, and JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from polyamp.report import Report, figure_for, unwritable, write_json

STDOUT = "-"


def check_files(json_file: str | None, plot_file: str | None = None) -> None:
    """Refuse files that `show` could not write, before a command that takes long.

    Raises:
        InvalidValueError: there is no such folder, or the picture's ending does not name an image format.
        MissingFrameworkError: matplotlib, which draws the picture, is not installed.
    """
    if plot_file is not None:
        figure_for(plot_file, (1, 1))
    for path in (Path(name) for name in (json_file, plot_file) if name not in (None, STDOUT)):
        if path.is_dir() or not path.parent.is_dir():
            raise unwritable(str(path), "it is a folder" if path.is_dir() else f"there is no folder {path.parent}")


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
