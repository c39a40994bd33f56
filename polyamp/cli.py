"""The command line: tables for people, JSON for programs. Commands about a user's step are in `polyamp.commands`."""

from __future__ import annotations

import errno
import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import polyamp
from polyamp import adapters
from polyamp.commands import diagnosis
from polyamp.commands import run as running
from polyamp.commands.parity import parity
from polyamp.errors import MissingFrameworkError, PolyampError, UnsupportedError
from polyamp.report import write_json

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
for command in (diagnosis.explain, diagnosis.diagnose, parity):
    app.command()(command)
app.command(context_settings={"allow_interspersed_args": False})(running.run)  # what follows the script is its own
console = Console() if sys.stdout and sys.stdout.isatty() else Console(width=120)  # files and pipes have no width


@app.callback()
def root() -> None:
    """One precision policy and one loss scaler for PyTorch, JAX and TensorFlow."""


@app.command()
def version() -> None:
    """Print the version."""
    console.print(polyamp.__version__)


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False) -> None:
    """Show which frameworks are installed, on which devices, and which formats are fast there."""
    found = examine()
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _print_diagnosis(found)
    if found["problem"]:
        raise typer.Exit(1)


def examine() -> dict[str, Any]:
    """Load every adapter and ask it to describe itself; for a missing framework, report how to install it."""
    names, problem = [], None
    try:
        names = adapters.names()
    except UnsupportedError as error:
        problem = str(error)
    return {
        "polyamp": polyamp.__version__,
        "python": platform.python_version(),
        "system": f"{platform.platform()}, {os.cpu_count()} cores",
        "problem": problem,
        "frameworks": {name: _examine(name) for name in names},
    }


def _examine(name: str) -> dict[str, Any]:
    try:
        with _without_log_lines():
            return {"installed": True, **adapters.adapter_named(name).describe()}
    except Exception as error:
        return {"installed": False, "why": adapters.why_broken(name, error)}


@contextmanager
def _without_log_lines() -> Iterator[None]:
    """Send what frameworks write to standard error to nowhere, C++ code included."""
    if sys.stderr is None:  # it is closed
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        kept = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _print_diagnosis(found: dict[str, Any]) -> None:
    console.print(f"polyamp {found['polyamp']}, Python {found['python']}, {found['system']}", highlight=False)
    if found["problem"]:
        console.print(found["problem"], style="yellow", highlight=False, markup=False)
        return
    table = Table("framework", "version", "device", "fast formats", "notes")
    for name, framework in found["frameworks"].items():
        for row in _doctor_rows(name, framework):
            table.add_row(*map(escape, row))  # escaping keeps the extra in pip install "polyamp[...]"
    console.print(table)


def _doctor_rows(name: str, framework: dict[str, Any]) -> list[list[str]]:
    if not framework["installed"]:
        state = "not installed" if "is not installed" in framework["why"] else "broken"
        return [[name, state, "", "", framework["why"]]]
    rows = [["", "", one["name"], ", ".join(one["fast"]) or "none", ""] for one in framework["devices"]]
    rows = rows or [[""] * 5]
    rows[0][:2] = [name, framework["version"]]
    rows[0][4] = "\n".join(framework["notes"])
    return rows


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each run.")] = 300,
    framework: Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every number to this file.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw loss and loss scale into this image.")] = None,
) -> None:
    """Train handwritten digits in float32 and in mixed precision, in every installed framework."""
    from polyamp import demo as digits

    examples, absent = digits.examples(framework)
    for reason in absent:
        console.print(reason, style="yellow", highlight=False, markup=False)
    if not examples:
        raise MissingFrameworkError("no framework to train in", where="polyamp demo", fix='pip install "polyamp[all]"')
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("training", total=len(examples) * len(digits.POLICIES) * steps)
        done = list(
            digits.runs(
                examples,
                steps,
                announce=lambda title: progress.update(bar, description=title),
                on_step=lambda: progress.advance(bar),
            )
        )
    console.print(digits.table(done))
    if json_file:
        write_json(digits.report(examples, done), json_file)
    if plot_file:
        digits.plot(done, str(plot_file))


def main() -> None:
    """Run the command line. Errors of polyamp or of writing output exit with code 1 and without a traceback."""
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # if writing fails, it fails here and not while Python exits
    except BrokenPipeError:  # the reader of the output closed it
        _without_output()
        sys.exit(1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EBADF) or error.filename is not None:
            raise  # raised by the user's own step
        _without_output()
        _end(f"the output cannot be written: {error}")
    except PolyampError as error:
        _end("\n  ".join([str(error), *getattr(error, "__notes__", ())]))


def _without_output() -> None:
    """Redirect the remaining output to the null device. Otherwise Python would fail on it once more at exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end(message: str) -> None:
    Console(stderr=True).print(f"error: {message}", style="red", highlight=False, markup=False)
    sys.exit(1)
