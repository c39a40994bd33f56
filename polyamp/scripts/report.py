"""The report of a run: a table on standard error for people, and JSON for programs."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import polyamp
from polyamp.scripts.runner import Script
from polyamp.scripts.summary import formats_of

_ROWS = 12
"""Operations in the table; the JSON has all."""


@dataclass(frozen=True)
class RunReport:
    """What one run of a script did.

    Attributes:
        script: what ran.
        summary: `polyamp.scripts.summary.summary_of` this process.
        children: the summaries of child processes.
        exit: how the script ended: its exit code, or its exception.
    """

    script: Script
    summary: dict[str, Any]
    children: list[dict[str, Any]]
    exit: str

    @property
    def processes(self) -> list[dict[str, Any]]:
        """Return the summaries of all processes, this one first."""
        return [self.summary, *self.children]

    @property
    def verdicts(self) -> list[str]:
        """Return what went badly. That nothing changed is only bad if it holds for all processes."""
        trained = [one for one in self.children if one["health"] or one["plans"]]
        counted = trained or [self.summary]
        return list(dict.fromkeys(verdict for one in counted for verdict in one["verdicts"]))

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "polyamp": polyamp.__version__,
            "python": platform.python_version(),
            "system": platform.platform(),
            "script": self.script.target,
            "arguments": list(self.script.arguments),
            "exit": self.exit,
            **self.summary,
            "children": self.children,
            "verdicts": self.verdicts,
        }

    def write(self, file: Path) -> None:
        """Write the report as JSON."""
        file.write_text(json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n")

    def show(self, console: Console) -> None:
        """Print the report."""
        policy = self.summary["policy"] or "no policy: mixed precision is the script's own"
        _line(console, f"polyamp run {self.script.target}: {self.exit}; {policy}")
        for line in dict.fromkeys(_facts(self.processes)):
            _line(console, line)
        first: list[dict[str, Any]] = next((one["plans"] for one in self.processes if one["plans"]), [])
        for plan in filter(itemgetter("operations"), first):
            _line(console, f"{plan.get('engine', '').partition(', ')[2] or 'what ran in which format'}:")
            console.print(_table(plan))
        for verdict in self.verdicts:
            _line(console, f"verdict: {verdict}", style="bold red")


def _facts(processes: list[dict[str, Any]]) -> Iterator[str]:
    for one in processes:
        if one["supplied"]:
            yield f"supplied: {', '.join(one['supplied'])}"
        for found in one["interfaces"]:
            yield f"used: {found['interface']}" + (f" at {found['where']}" if found["where"] else "")
        for health in one["health"]:
            yield f"loss scale: {health['text']}"
        yield from (f"note: {note}" for note in one["notes"])


def _table(plan: dict[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("operation", "ran in"):
        table.add_column(heading)
    rows = formats_of(plan)
    for name, formats in rows[:_ROWS]:
        table.add_row(escape(name), ", ".join(f"{format_name} {count}" for format_name, count in formats.items()))
    if len(rows) > _ROWS:
        table.add_row(f"{len(rows) - _ROWS} more", "--report FILE lists them")
    return table


def _line(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)
