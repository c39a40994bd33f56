"""``python -m polyamp.backends.torch.build``: builds the compiled libraries, and checks what the compilers made.

Without nvcc it builds for the CPU only. Exit codes: 0, everything is built; 1, not built, or a check fails; 2, wrong
options.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from polyamp.backends.torch.building import architectures, builder, checks, toolchain
from polyamp.backends.torch.building.builder import Built
from polyamp.backends.torch.building.checks import Kernel
from polyamp.backends.torch.building.recipes import RECIPES, Job
from polyamp.backends.torch.building.toolchain import Toolchain
from polyamp.errors import ExtensionError, PolyampError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console() if sys.stdout.isatty() else Console(width=120)  # files and pipes have no width
messages = Console(stderr=True)


@dataclass(frozen=True)
class Report:
    """The result for one library."""

    name: str
    built: Built
    kernels: Sequence[Kernel]
    problems: Sequence[str]

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return {
            "library": str(self.built.path),
            "architectures": list(self.built.architectures),
            "compilers": self.built.compilers,
            "reused": self.built.reused,
            "kernels": [asdict(kernel) for kernel in self.kernels],
            "problems": list(self.problems),
        }


@app.command()
def build(
    arch: Annotated[
        str, typer.Option(help="native (the GPUs of this machine, else 9.0), all, or a list such as 9.0,12.0+PTX.")
    ] = "native",
    check: Annotated[bool, typer.Option("--check", help="Fail on spills, many registers, narrow access.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Build also what is there already.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Build polyamp's compiled libraries for PyTorch, and print their paths."""
    reports = list(_reports(_toolchain(arch), arch, check=check, force=force))
    if as_json:
        print(json.dumps({report.name: report.as_dict() for report in reports}, indent=2))
    else:
        for report in reports:
            _print(report)
    if any(report.problems for report in reports):
        raise typer.Exit(1)


def _toolchain(arch: str) -> Toolchain:
    """Return the compilers; without nvcc only if no architecture was asked for."""
    try:
        return toolchain.find(cuda=True)
    except ExtensionError as error:
        if arch != "native":
            raise
        host = toolchain.find(cuda=False)
        messages.print(f"For the CPU alone, since {error}", style="yellow", highlight=False, markup=False)
        return host


def _reports(found: Toolchain, arch: str, *, check: bool, force: bool) -> Iterator[Report]:
    chosen = architectures.choose(arch, found.nvcc.knows) if found.nvcc else ()
    for name, recipe in RECIPES.items():
        job = Job.of(recipe(), found, chosen)
        with _progress(name, len(job.sources) + 1) as on_step:
            built = builder.build(job, retry=True, force=force, on_step=on_step)
        kernels = checks.examine(job, built) if check else []
        yield Report(name, built, kernels, _problems(job, built, kernels) if check else [])


def _problems(job: Job, built: Built, kernels: Sequence[Kernel]) -> list[str]:
    problems = checks.warnings(built.log) + [problem for kernel in kernels for problem in kernel.problems()]
    if job.recipe.device and not kernels:
        problems.append("no kernels to check: the library is for the CPU only")
    return problems


@contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[str], None]]:
    """Yield a callback for each finished file: it moves a bar, or prints lines without a terminal."""
    if not messages.is_terminal:
        yield lambda file: messages.print(f"{name}: {file}", highlight=False, markup=False)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=messages, transient=True) as progress:
        bar = progress.add_task(name, total=total)
        yield lambda file: progress.advance(bar)


def _print(report: Report) -> None:
    built = report.built
    made_for = ", ".join(built.architectures) or "the CPU"
    how = "was built before" if built.reused else "built"
    console.print(f"{report.name}: {how} for {made_for}, by {built.compilers}", highlight=False, markup=False)
    console.print(f"  {built.path}", highlight=False, markup=False, soft_wrap=True)
    if report.kernels:
        console.print(kernel_table(report.kernels))
    for problem in report.problems:
        console.print(problem, style="red", highlight=False, markup=False)


def kernel_table(kernels: Sequence[Kernel]) -> Table:
    """Return a table of the kernels, one row each."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("kernel")
    for heading in ("for", "registers", "spilled bytes", "parameter bytes"):
        table.add_column(heading, justify="right")
    table.add_column("16-byte access")
    table.add_column("loads at once", justify="right")
    for kernel in kernels:
        wide = "not looked at" if kernel.wide is None else ", ".join(kernel.wide) or "none"
        numbers = (kernel.registers, kernel.spills, "" if kernel.parameters is None else kernel.parameters)
        at_once = "" if kernel.in_flight is None else str(kernel.in_flight)
        table.add_row(kernel.name, kernel.architecture, *map(str, numbers), wide, at_once)
    return table


def main() -> None:
    """Run the command; polyamp's own errors are printed without a traceback, with exit code 1."""
    try:
        app()
    except PolyampError as error:
        messages.print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
