"""The output of commands: a rich table on a terminal, the report's own text elsewhere, and JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from polyamp.diagnosis.pictures import figure_for
from polyamp.errors import InvalidValueError
from polyamp.layout import write_json

STDOUT = "-"

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan", "ok": "green", "failed": "red"}


class Reported(Protocol):
    """A report: text, rows and JSON values."""

    def rows(self) -> Sequence[Sequence[str]]:
        """Return the report's table, the heading first; empty if there is nothing to report."""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""


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


def show(report: Reported, json_file: str | None, plot_file: str | None = None) -> None:
    """Print a report, write its JSON and draw its picture.

    Args:
        report: the result of a verb.
        json_file: the file for its JSON. ``-`` is standard output, and then nothing else is printed there. None writes
            no JSON.
        plot_file: the file for its picture, if it has one.

    Raises:
        InvalidValueError: a file cannot be written.
    """
    if json_file == STDOUT:
        print(json.dumps(report.as_dict(), indent=1, allow_nan=False))
    elif sys.stdout.isatty():
        _show_rich(report, Console())
    else:
        print(report)
    try:
        if json_file not in (None, STDOUT):
            write_json(report.as_dict(), str(json_file))
        if plot_file is not None:
            report.plot(plot_file)  # type: ignore[attr-defined]
    except OSError as error:
        raise _unwritable(str(error)) from error


def _show_rich(report: Reported, console: Console) -> None:
    """Print the report's text with its table drawn by rich.

    If the text contains no table, as that of lint, print its heading and then the table.
    """
    rows, sections = report.rows(), str(report).split("\n\n")
    tables = [place for place, section in enumerate(sections) if rows and _is_table(section, rows[0])]
    place = tables[0] if tables else 1
    for section in sections[:place]:
        console.print(section, highlight=False, markup=False, soft_wrap=True)
    if rows:
        console.print(_rich_table(rows))
    for section in sections[place + 1 :] if tables else []:
        console.print(section, highlight=False, markup=False, soft_wrap=True)


def _is_table(section: str, header: Sequence[str]) -> bool:
    return section.split("\n")[0].split() == " ".join(header).split()


def _rich_table(rows: Sequence[Sequence[str]]) -> Table:
    header, *body = rows
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for place, heading in enumerate(header):
        numbers = all(row[place][:1] in "+-.0123456789" for row in body)
        table.add_column(escape(heading), justify="right" if numbers else "left", overflow="fold")
    for row in body:
        table.add_row(*map(escape, row), style=next((_STYLES[cell] for cell in row if cell in _STYLES), None))
    return table
