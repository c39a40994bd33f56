"""The command line: tables for people, JSON for programs. Commands about a user's step are in `polyamp.commands`."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import platform
import sys
import time
from importlib import metadata
from multiprocessing.connection import Connection
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
def doctor(
    framework: Annotated[list[str] | None, typer.Argument(help="Only these, however long they take to load.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show which frameworks are installed, on which devices, and which formats are fast there."""
    found = examine(framework)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _print_diagnosis(found)
    if found["problem"]:
        raise typer.Exit(1)


_SLOW = ("keras", "tensorflow")  # importing them can take ten seconds
_PATIENCE = 2.0  # seconds for which doctor waits for these


def examine(asked: list[str] | None = None) -> dict[str, Any]:
    """Let adapters describe their frameworks, side by side in processes of their own: all, or those asked for."""
    names, problem = asked or [], None
    try:
        names = [adapters.entry_named(name).name for name in names] or adapters.names()
    except UnsupportedError as error:
        problem = str(error)
    end = time.monotonic() + _PATIENCE
    answers = {name: _ask(name) for name in names}
    for name in sorted(names, key=_SLOW.__contains__):
        can_wait = bool(asked) or name not in _SLOW
        answers[name].poll(None if can_wait else max(0.0, end - time.monotonic()))
    return {
        "polyamp": polyamp.__version__,
        "python": platform.python_version(),
        "system": f"{platform.platform()}, {os.cpu_count()} cores",
        "problem": problem,
        "frameworks": {name: _answer(name, pipe) for name, pipe in answers.items()},
    }


def _ask(name: str) -> Connection:
    """Start a process that sends the description of a framework; it ends with this one at the latest."""
    context = multiprocessing.get_context("fork")  # starts at once, and knows what is loaded
    receives, sends = context.Pipe(duplex=False)
    context.Process(target=_examine, args=(name, sends), daemon=True).start()
    sends.close()
    return receives


def _examine(name: str, sends: Connection) -> None:
    os.nice(19 if name in _SLOW else 0)  # the others come first
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)  # for what frameworks log, C++ code included
    try:
        found = {"installed": True, **adapters.adapter_named(name).describe()}
    except Exception as error:
        found = {"installed": False, "why": adapters.why_broken(name, error)}
    sends.send(json.dumps(found))  # a version may be an object of the framework's


def _answer(name: str, receives: Connection) -> dict[str, Any]:
    try:
        if receives.poll():
            answer: dict[str, Any] = json.loads(receives.recv())
            return answer
    except EOFError:
        return {"installed": False, "why": adapters.why_broken(name, SystemError("the process ended"))}
    found = [one for package in (name, f"{name}-cpu") for one in metadata.distributions(name=package)]
    notes = [f"not asked for devices, since it takes long to load: polyamp doctor {name} waits for it"]
    return {"installed": True, "version": found[0].version if found else "", "devices": [], "notes": notes}


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
