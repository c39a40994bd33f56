"""``polyamp migrate``: print, or write, the conversion of programs to polyamp.

The exit code is 0 if every file is converted wholly or has nothing to convert, `DECIDE` if a person has to decide about
a place, 1 for polyamp's own errors, and 2 for a wrong command line.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from polyamp.refusals import missing

if TYPE_CHECKING:
    from polyamp.migration.report import Migration, Report

DECIDE = 3
"""The exit code if a file was left as it is, or has a comment to look at."""

_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def migrate(
    files: Annotated[list[str], typer.Argument(help="Python files, or folders of them.", show_default=False)],
    write: Annotated[bool, typer.Option("--write", help="Write the files instead of printing the diff.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Convert programs from Apex, torch.amp, Keras, TensorFlow 1 and jmp. Exit code 3: a person has to decide."""
    if find_spec("libcst") is None:
        raise missing("libcst", extra="migrate")
    from polyamp.migration import files as programs
    from polyamp.migration.report import Report

    found = tuple(programs.migrate_file(path) for path in programs.python_files(files))
    changed = [one for one in found if one.before != one.after]
    if write:
        for migration in changed:
            programs.write(migration)
    report = Report(found, tuple(one.path for one in changed if write))
    if as_json:
        print(json.dumps(report.as_dict(), indent=1))
    else:
        _show(report, [] if write else changed)
    if report.needs_decision:
        raise typer.Exit(DECIDE)


def _show(report: Report, changed: list[Migration]) -> None:
    console = Console(soft_wrap=True) if sys.stdout.isatty() else None
    for migration in changed:
        for line in migration.diff.splitlines():
            style = "bold" if line.startswith(("+++", "---")) else _STYLES.get(line[:1])
            if console is None:
                print(line)
            else:
                console.print(line, style=style, highlight=False, markup=False)
    for path in report.written:
        print(f"{path}: written")
    print(report)
