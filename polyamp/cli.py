"""The command line: tables for people, JSON for programs.

The exit code is 0 if nothing is wrong, `FINDINGS` if a command found something wrong, 1 for polyamp's own errors, and 2
for a wrong command line. `polyamp run` ends with the script's own code.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import polyamp
from polyamp.cli_target import step_of, training_of
from polyamp.diagnosis.equivalence import FIRST_LOOK
from polyamp.diagnosis.probe import sixteen_bit
from polyamp.doctor import examine, is_wrong, rows_of, rows_of_test
from polyamp.errors import InvalidValueError, MissingFrameworkError, PolyampError
from polyamp.policies import is_automatic
from polyamp.report import Report, figure_for, unwritable, write_json
from polyamp.run import run_script
from polyamp.selftest import TESTED

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console() if sys.stdout and sys.stdout.isatty() else Console(width=120)  # files and pipes have no width

STDOUT = "-"
FINDINGS = 3
OF_VERDICTS = {"equivalent": 0, "better": 0, "worse": FINDINGS, "not yet known": 4, "cannot tell": 5}
INTERRUPTED = 130  # as in shells

_STEP = (
    "package.module:function; called without arguments, it returns a step, (step, *arguments) or a dict of them, "
    "or it is the step."
)
_TRAIN = (
    "package.module:function: train(policy, seed), which returns the metric; or a function that returns it, or a dict."
)
_MARGIN = "The largest difference that would not matter: a number, or a share of float32's mean."

StepTarget = Annotated[str, typer.Argument(help=_STEP, metavar="MODULE:FUNCTION", show_default=False)]
PolicyName = Annotated[str | None, typer.Option("--policy", help="Policy, by name; mixed_float16 by default.")]
JsonFile = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write JSON; - is standard output.")]
PlotFile = Annotated[str | None, typer.Option("--plot", metavar="FILE", help="Draw a picture into this image file.")]
Backend = Annotated[str | None, typer.Option("--backend", help="torch, jax, tensorflow or keras, if it is unclear.")]


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
    test: Annotated[bool, typer.Option("--test", help="Test each format on each device, right and how fast.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Test again, although a result is kept.")] = False,
) -> None:
    """Show which frameworks are installed, on which devices, and which formats are fast there.

    With --test, exit code 1: something is wrong in a format, or a framework ended or hung.
    """
    with Console(stderr=True).status("loading") if test or again else nullcontext() as line:
        found = examine(framework, line.update if line else None, again=again)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _print_diagnosis(found)
    if found["problem"] or is_wrong(found):
        raise typer.Exit(1)


def _print_diagnosis(found: dict[str, Any]) -> None:
    console.print(f"polyamp {found['polyamp']}, Python {found['python']}, {found['system']}", highlight=False)
    if found["problem"]:
        console.print(found["problem"], style="yellow", highlight=False, markup=False)
        return
    table = Table("framework", "version", "device", "fast formats", "notes")
    for name, framework in found["frameworks"].items():
        for row in rows_of(name, framework):
            table.add_row(*map(escape, row))  # escaping keeps the extra in pip install "polyamp[...]"
    console.print(table)
    if "selftest" in found:
        _print_tests(found["selftest"])


def _print_tests(tests: dict[str, Any]) -> None:
    table = Table("device", "operation", *TESTED, title="Self-test", caption="speed: times float32's")
    for name, test in tests.items():
        for row in rows_of_test(name, test):
            table.add_row(*map(escape, row), style="red" if any(cell.startswith("wrong") for cell in row) else None)
        table.add_section()
    console.print(table)
    for name, test in tests.items():
        kept = [f"from {test['kept']}; polyamp doctor --test --again tests again"] if test["kept"] else []
        for text in filter(None, (test["problem"], *test["notes"], *kept)):
            console.print(f"{name}: {text}", highlight=False, markup=False)


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


@app.command()
def explain(
    target: StepTarget,
    policy: PolicyName = None,
    json_file: JsonFile = None,
    backend: Backend = None,
    engine: Annotated[str | None, typer.Option("--engine", help="rewrite, or in PyTorch autocast.")] = None,
    memory: Annotated[
        float | None,
        typer.Option("--memory", metavar="GIB", help="With --examples: the largest batch for so many GiB."),
    ] = None,
    examples: Annotated[
        int | None, typer.Option("--examples", help="How many examples the step's arguments hold.")
    ] = None,
) -> None:
    """Show the format of every operation of a step, and why. Exit code 3: a rule of the policy matches nothing."""
    if memory is not None and examples is None:
        raise typer.BadParameter("--memory needs --examples N: how many examples the step's arguments hold")
    step = step_of(target)
    chosen = sixteen_bit(step.options.get("policy") if policy is None else policy)
    plan = step.call(polyamp.explain, policy=chosen, backend=backend, engine=engine, examples=examples)
    values = plan.as_dict()
    if memory is not None:
        largest = plan.largest_batch(int(memory * 2**30))
        values["largest_batch"] = largest._asdict()
    _show([plan], values, json_file)
    if memory is not None and json_file != STDOUT:
        print(f"\nlargest batch in {memory:g} GiB with AdamW: {largest.policy} (float32: {largest.float32})")
    raise typer.Exit(FINDINGS if plan.unused_rules else 0)


@app.command()
def diagnose(
    target: StepTarget,
    policy: PolicyName = None,
    scale: Annotated[
        float | None, typer.Option("--scale", help="Loss scale; by default that of the step or policy.")
    ] = None,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    backend: Backend = None,
) -> None:
    """Report what is wrong with a step in 16 bits, which loss scales are safe, and what to do.

    Exit code 3: something is found before or in the step, or no loss scale is safe.
    """
    step = step_of(target)
    found = step.call(polyamp.lint, policy=policy, backend=backend)
    verdict = step.call(polyamp.diagnose, policy=policy, backend=backend, scale=scale)
    values = {**verdict.as_dict(), "probe": verdict.probe.as_dict(), "lint": found.as_dict()}
    _show([found, verdict.probe, verdict], values, json_file)
    if plot_file is not None:
        verdict.probe.plot(plot_file)
    is_bad = verdict.kind not in ("finite", "scale") or not verdict.probe.is_safe
    raise typer.Exit(FINDINGS if found.errors or found.warnings or is_bad else 0)


@app.command()
def profile(
    target: StepTarget,
    policy: Annotated[
        str | None, typer.Option("--policy", help="Policy, by name; by default the step runs as it is.")
    ] = None,
    runs: Annotated[int | None, typer.Option(min=1, help="Runs under the profiler.  [5]")] = None,
    folder: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Keep the profiler's file in here.  [polyamp_profile]")
    ] = None,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    backend: Backend = None,
) -> None:
    """Show where the time of a step goes: 16-bit products, casts, memory-bound work, the optimizer, the host.

    The step runs several times, and what it changes stays changed. Perfetto and TensorBoard open the profiler's file.
    """
    _check_files(json_file, plot_file)
    with _printing_elsewhere(json_file):
        found = step_of(target).call(polyamp.profile, policy=policy, runs=runs, folder=folder, backend=backend)
    _show([found], found.as_dict(), json_file)
    if plot_file is not None:
        found.plot(plot_file)


@app.command()
def parity(
    target: Annotated[str, typer.Argument(help=_TRAIN, metavar="MODULE:FUNCTION", show_default=False)],
    policy: Annotated[list[str] | None, typer.Option(help="Policy, by name; may be repeated.  [mixed_float16]")] = None,
    seeds: Annotated[
        int | None, typer.Option(min=FIRST_LOOK, help="Seeds, unless the answer is clear before.  [10]")
    ] = None,
    margin: Annotated[str | None, typer.Option(help=f"{_MARGIN}  [0.5%]")] = None,
    metric: Annotated[
        str | None, typer.Option(help="Which metric, if there are several; by default the first.")
    ] = None,
    better: Annotated[
        Literal["higher", "lower"] | None, typer.Option(help="Which is better; by default as the metric's name tells.")
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="Chance of a wrong verdict.  [0.05]")] = None,
    controls: Annotated[bool | None, typer.Option(help="Train the negative controls too.  [yes]")] = None,
    stop_early: Annotated[bool | None, typer.Option(help="Stop as soon as the answer is clear.  [yes]")] = None,
    first_seed: Annotated[int | None, typer.Option(help="The first seed.  [0]")] = None,
    keep: Annotated[
        str | None, typer.Option(metavar="FILE", help="Add every run to this file, and take those it has from there.")
    ] = None,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Train over seeds in float32 and under policies, and report whether the results are equivalent.

    Exit code 3: a policy is worse. 4: not yet known, more seeds are needed. 5: the task cannot tell.
    """
    _check_files(json_file, plot_file)
    options = {"policy": policy, "seeds": seeds, "margin": margin, "metric": metric, "better": better, "alpha": alpha}
    options |= {"controls": controls, "stop_early": stop_early, "first_seed": first_seed, "keep": keep}
    try:
        with _printing_elsewhere(json_file):
            found = training_of(target).call(polyamp.parity, **options)
    except KeyboardInterrupt:
        kept = f"finished runs are in {keep}: the same command goes on" if keep else "--keep FILE would keep the runs"
        print(f"\ninterrupted: {kept}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    _show([found], found.as_dict(), json_file)
    if plot_file is not None:
        found.plot(plot_file)
    raise typer.Exit(OF_VERDICTS[found.verdict])


@app.command(context_settings={"allow_interspersed_args": False})  # what follows the script is its own
def run(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="A Python file, folder or module.", show_default=False)
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="The script's own.", show_default=False)
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option("--policy", help="Train under this policy, by name. Without it only shims are installed."),
    ] = None,
    report: Annotated[Path | None, typer.Option("--report", metavar="FILE", help="Write the report as JSON.")] = None,
    is_module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as after python -m.")] = False,
) -> None:
    """Run a script unmodified: supply modules that it lacks, such as apex, and with --policy turn mixed precision on.

    The report goes to standard error. The exit code is the script's; it is 1 if the script cannot be run safely.
    """
    if not is_module and not Path(script).is_file() and not Path(script, "__main__.py").is_file():
        raise InvalidValueError(
            "there is no such script",
            where="polyamp run",
            found=script,
            allowed="a Python file, or a folder with __main__.py; after -m the name of a module",
            fix="options of polyamp run come before the script, the script's own after it",
        )
    if is_automatic(policy):
        raise InvalidValueError(
            "auto depends on the loaded framework, which the script has yet to load",
            where="polyamp run --policy",
            found="auto",
            allowed="a policy's name, such as mixed_bfloat16",
            fix="""python -c "import torch, polyamp; print(polyamp.policy('auto'))" prints the name for PyTorch""",
        )
    _check_files(None if report is None else str(report))
    chosen = None if policy is None else polyamp.policy(policy)
    hook, sys.excepthook = sys.excepthook, sys.__excepthook__  # typer's is not the one that a script expects
    try:
        error = run_script(script, arguments or (), is_module=is_module, policy=chosen, report=report)
        if isinstance(error, SystemExit):
            raise error
        if error is not None:
            sys.excepthook(type(error), error, error.__traceback__)  # the script's own, if it set one
            raise SystemExit(INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)
    finally:
        sys.excepthook = hook


# --- output ----------------------------------------------------------------------------------------------------------


def _check_files(json_file: str | None, plot_file: str | None = None) -> None:
    """Refuse files that cannot be written, before a command that takes long."""
    if plot_file is not None:
        figure_for(plot_file, (1, 1))
    for path in (Path(name) for name in (json_file, plot_file) if name not in (None, STDOUT)):
        if path.is_dir() or not path.parent.is_dir():
            raise unwritable(str(path), "it is a folder" if path.is_dir() else f"there is no folder {path.parent}")


@contextmanager
def _printing_elsewhere(json_file: str | None) -> Iterator[None]:
    """Send what the user's code prints to standard error, if standard output is for JSON."""
    with redirect_stdout(sys.stderr) if json_file == STDOUT else nullcontext():
        yield


def _show(reports: Sequence[Report], values: Mapping[str, Any], json_file: str | None) -> None:
    """Print reports and write their JSON; ``-`` is standard output, and then nothing else is printed there."""
    if json_file == STDOUT:
        print(json.dumps(values, indent=1, allow_nan=False))
        return
    print(*reports, sep="\n\n")
    if json_file is not None:
        write_json(values, json_file)


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
