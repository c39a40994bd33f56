"""The output of commands: a rich table on a terminal, the report's own text elsewhere, and JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from polyamp.diagnosis.pictures import figure_for
from polyamp.errors import InvalidValueError
from polyamp.report import Report, write_json

STDOUT = "-"

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan", "ok": "green", "failed": "red"}


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
            raise _unwritable(f"{path} is a folder" if path.is_dir() else f"there is no folder {path.parent}")


@contextmanager
def printing_elsewhere(json_file: str | None) -> Iterator[None]:
    """Send what the user's code prints to standard error, if standard output is for JSON."""
    with redirect_stdout(sys.stderr) if json_file == STDOUT else nullcontext():
        yield


def _unwritable(found: str) -> InvalidValueError:
    return InvalidValueError(
        "the file cannot be written",
        where="--json or --plot",
        found=found,
        allowed="a file in a folder that exists",
        fix="make the folder first, or name another file",
    )


def show(reports: Sequence[Report], values: Mapping[str, Any], json_file: str | None) -> None:
    """Print reports and write their JSON; ``-`` is standard output, and then nothing else is printed there."""
    if json_file == STDOUT:
        print(json.dumps(values, indent=1, allow_nan=False))
        return
    console = Console()
    for place, report in enumerate(reports):
        if place:
            print()
        if sys.stdout.isatty():
            show_rich(report, console)
        else:
            print(report)
    if json_file is not None:
        with writing():
            write_json(values, json_file)


@contextmanager
def writing() -> Iterator[None]:
    """Refuse a file of the user's that cannot be written."""
    try:
        yield
    except OSError as error:
        raise _unwritable(str(error)) from error


def show_rich(report: Report, console: Console) -> None:
    """Print a report with its table drawn by rich."""
    console.print(report.heading(), highlight=False, markup=False, soft_wrap=True)
    if report.rows():
        console.print(_rich_table(report.rows()))
    for sentence in report.sentences():
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)


def _rich_table(rows: Sequence[Sequence[str]]) -> Table:
    header, *body = rows
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for place, heading in enumerate(header):
        numbers = all(row[place][:1] in "+-.0123456789" for row in body)
        table.add_column(escape(heading), justify="right" if numbers else "left", overflow="fold")
    for row in body:
        table.add_row(*map(escape, row), style=next((_STYLES[cell] for cell in row if cell in _STYLES), None))
    return table
