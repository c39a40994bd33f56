"""Reproduce the two tables that mixed precision became known by, and the figure of the LSTM that needs a loss scale.

    python benchmarks/founding_tables.py accuracy                       # the published rows, on a CPU
    python benchmarks/founding_tables.py accuracy --all                 # and the models of the other table
    python benchmarks/founding_tables.py accuracy --framework jax --model resnet50 --first-seed 10 --seeds 20
    python benchmarks/founding_tables.py figure                         # the big LSTM by loss scale
    python benchmarks/founding_tables.py speed                          # on a GPU, at published shapes
    python benchmarks/founding_tables.py gather OTHER/RESULTS ...       # take over rows that others measured
    python benchmarks/founding_tables.py page                           # write tables and pictures into the documents

Every row is kept as soon as it is measured, and is not measured again on the same machine by the same versions, unless
``--again`` is given: a run that was stopped goes on where it was. Models and published numbers: examples/models;
explanation: docs/explain/founding_tables.md.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
sys.path.append(str(Path(__file__).parents[1] / "examples"))

import founding_accuracy as accuracy
import founding_lstm as lstm
import founding_results as results
import founding_speed as speed
import founding_text as text
import typer
from interleave import console
from keeping import Row, machine
from models import founding
from rich.box import SIMPLE_HEAD
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table
from side_by_side import cores, finished
from whole_steps import chosen

app = typer.Typer(add_completion=False, help=__doc__.replace("\n\n", "\n\n\b\n"), rich_markup_mode=None)
IMAGES = text.PAGE.parents[1] / "images"
Frameworks = Annotated[
    list[str] | None, typer.Option("--framework", help=f"Of {', '.join(results.FRAMEWORKS)}; may be repeated.")
]
Models = Annotated[
    list[str] | None,
    typer.Option("--model", help=f"Of {', '.join(row.name for row in founding.ROWS)}; may be repeated."),
]
Again = Annotated[bool, typer.Option("--again", help="Measure also what was measured before.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the rows to this file too.")]
Plot = Annotated[Path | None, typer.Option(help="Draw the kept rows into this image file.")]


class Work:
    """Cases that are done one after another: one that fails loses no other, and fails the command at its end."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def attempt(self, case: str, measure: Callable[[], Any]) -> Any:
        """Return the result, or None if it fails."""
        try:
            return measure()
        except Exception:
            traceback.print_exc()
            self.failed.append(case)
            return None

    def end(self) -> None:
        """Exit with 1 if a case failed."""
        if self.failed:
            console().print(f"failed: {', '.join(self.failed)}")
            raise typer.Exit(1)


def installed(asked: Iterable[str] | None) -> list[str]:
    """Return the frameworks that were asked for, without those that are not installed."""
    known = chosen(asked, results.FRAMEWORKS)
    for framework in known:
        if find_spec(framework) is None:
            console().print(f"{framework} is not installed: no rows")
    return [framework for framework in known if find_spec(framework)]


def table(title: str, headings: Iterable[str], cells: Iterable[Iterable[str]]) -> Table:
    made = Table(*headings, title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in cells:
        made.add_row(*row)
    return made


def models_of(asked: Iterable[str] | None, known: Iterable[founding.Row]) -> list[founding.Row]:
    rows = {row.name: row for row in known}
    return [rows[name] for name in chosen(asked, rows)]


@app.command("accuracy")
def accuracy_command(
    framework: Frameworks = None,
    model: Models = None,
    every: Annotated[bool, typer.Option("--all", help="Also models of which a speed-up alone was published.")] = False,
    seeds: Annotated[int, typer.Option(min=3, help="Seeds of each row.")] = 10,
    first_seed: Annotated[
        int, typer.Option(min=0, help="Begin with this seed; above 0 the rows are kept as of new seeds.")
    ] = 0,
    again: Again = False,
    jobs: Annotated[int, typer.Option(min=1, help="Rows at a time, each in a process of its own.")] = cores(),
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """Train the models over seeds in float32 and in 16 bits, and compare them by `polyamp.parity`."""
    work, start = Work(), time.perf_counter()
    asked = models_of(model, founding.ROWS if model or every else founding.accuracy_rows())
    drawn = range(first_seed, first_seed + seeds)
    cases = dict(missing(installed(framework), asked, drawn, again))
    if min(jobs, len(cases)) < 2:
        one_by_one(cases, drawn, work)
    else:
        several_at_a_time(cases, drawn, work, jobs)
    taken = (time.perf_counter() - start) / 60
    files = accuracy.files_of(drawn)
    shown(list(accuracy.measured(files)), json_file)
    console().print(f"this run: {len(cases)} rows in {taken:.1f} minutes")
    if plot is not None:
        accuracy.draw(plot, files)
    work.end()


Cases = dict[str, tuple[str, founding.Row]]
"""Rows to measure: a framework and a model, by their title."""


def missing(
    frameworks: Iterable[str], asked: Iterable[founding.Row], seeds: range, again: bool
) -> Iterator[tuple[str, tuple[str, founding.Row]]]:
    """Yield the rows that are to be measured, and print which are not, and why."""
    for name, row in itertools.product(frameworks, asked):
        case = f"{row.title} in {results.FRAMEWORKS[name]}"
        if not accuracy.is_written(name, row.name):
            console().print(f"{case}: not in this framework")
        elif not again and (kept := accuracy.earlier(name, row, seeds)):
            console().print(f"{case}: trained on {kept['finished']}; --again trains it again")
        else:
            yield case, (name, row)


def one_by_one(cases: Cases, seeds: range, work: Work) -> None:
    """Measure rows in this process."""
    for case, own in cases.items():
        metric = own[1].metric
        console().print(f"{case}: {len(seeds)} seeds, margin {founding.margin_of(metric):g} of {metric}")
        work.attempt(case, lambda own=own: accuracy.keep(*own, seeds, accuracy.measure(*own, seeds)))


def several_at_a_time(cases: Cases, seeds: range, work: Work, jobs: int) -> None:
    """Measure rows side by side in processes of their own, those first that took longest before."""
    works = {case: partial(accuracy.measure, *cases[case], seeds, progress=False) for case in longest_first(cases)}
    runs, open_rows = len(seeds) * (1 + len(accuracy.POLICIES)), dict(cases)
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console()) as bar:
        trained = bar.add_task("trainings", total=runs * len(cases))

        def show() -> None:
            ended = runs * (len(cases) - len(open_rows))
            done = (accuracy.runs_done(*row, seeds) for row in open_rows.values())
            bar.update(trained, completed=ended + sum(done))

        def keep(case: str, row: Future[Row]) -> None:
            kept = accuracy.keep(*open_rows.pop(case), seeds, row.result())
            bar.console.print(f"{case}: {text.minutes(kept):.1f} minutes of training")

        for case, row in finished(works, jobs, show):
            work.attempt(case, partial(keep, case, row))


def longest_first(cases: Cases) -> list[str]:
    """Return the rows by how long they took before; first of all those of which nothing is known."""
    before = {(row["framework"], row["name"]): text.minutes(row) for row in accuracy.measured()}
    taken = {case: before.get((framework, row.name), math.inf) for case, (framework, row) in cases.items()}
    return sorted(taken, key=taken.__getitem__, reverse=True)


def shown(kept: list[Row], json_file: Path | None) -> None:
    """Print the accuracy table of each framework, and write it to a file."""
    for name, title in results.FRAMEWORKS.items():
        if own := [row for row in kept if row["framework"] == name]:
            console().print(table(title, text.ACCURACY_HEADINGS, map(text.accuracy_cells, own)))
    console().print(f"{sum(map(text.minutes, kept)):.1f} minutes of training in all")
    if json_file is not None:
        json_file.write_text(json.dumps({"rows": kept}, indent=2) + "\n")


@app.command("figure")
def figure_command(
    framework: Frameworks = None,
    steps: Annotated[int, typer.Option(min=lstm.LAST, help="Steps of a curve.")] = lstm.STEPS,
    seed: int = 0,
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """Train the big LSTM in float32, and in float16 with scale 1, scale 128 and a dynamic scale; draw the losses."""
    work, names = Work(), installed(framework)
    for name in (name for name in names if accuracy.is_written(name, lstm.MODEL)):
        for curve in lstm.CURVES:
            kept = work.attempt(
                f"{curve} in {name}", lambda name=name, curve=curve: lstm.measure(name, curve, seed, steps)
            )
            if kept:
                console().print(f"{results.FRAMEWORKS[name]}, {curve}: {text.loss_of(kept)} ({kept['seconds']:.0f} s)")
    if json_file is not None:
        found = [row for name in names for row in lstm.measured(name).values()]
        json_file.write_text(json.dumps({"rows": found}, indent=2) + "\n")
    if plot is not None:
        lstm.draw(plot)
    work.end()


@app.command("speed")
def speed_command(
    model: Models = None,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Tiny sizes on the CPU: a check, nothing is kept.")
    ] = False,
) -> None:
    """Time whole training steps at published shapes against float32, TF32 and native mixed precision; needs a GPU."""
    if "gpu" not in machine() and not rehearse:
        raise typer.BadParameter(
            "this machine has no GPU, and no time of a CPU goes into this table. On a GPU run "
            "`python benchmarks/founding_tables.py speed`: ten minutes a row. Here, --rehearse checks that it runs"
        )
    work, measure = Work(), speed.rehearse if rehearse else speed.measure
    found = [
        row
        for one in models_of(model, speed.timed_rows())
        for row in work.attempt(one.title, lambda one=one: list(measure(one))) or []
    ]
    title = "a rehearsal on a CPU: these are not results" if rehearse else "speed-up, polyamp / native"
    console().print(table(title, text.SPEED_HEADINGS, map(text.speed_cells, found)))
    work.end()


@app.command("gather")
def gather_command(folders: Annotated[list[Path], typer.Argument(help="Folders of results.")]) -> None:
    """Take over the rows of other folders of results, the newest of each name."""
    for name, rows in results.gather(folders).items():
        console().print(f"{name}: {', '.join(rows)}")


@app.command("page")
def page_command() -> None:
    """Write the kept results into docs/explain/founding_tables.md, and draw its pictures."""
    text.PAGE.write_text(text.filled(text.PAGE.read_text()))
    for name, found, draw in (
        ("accuracy", any(accuracy.measured()), accuracy.draw),
        ("lstm", any(map(lstm.measured, results.FRAMEWORKS)), lstm.draw),
    ):
        if found:
            draw(IMAGES / f"founding_{name}.png")


if __name__ == "__main__":
    app()
