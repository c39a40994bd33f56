"""Keep a long benchmark's rows as they come, with what was left out and why; and what others have published."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import typer
from interleave import RESULTS, keep, machine
from rich.box import SIMPLE_HEAD
from rich.table import Table

KEY = ("model", "way", "variant")
PUBLISHED = Path(__file__).parent / "published.json"
NO_MEMORY = ("OutOfMemoryError", "RESOURCE_EXHAUSTED")
Row = dict[str, Any]


def place(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in KEY)


class Keeper:
    """Rows that are written to ``results/<named>.json`` as soon as they are there.

    Of an earlier run by the same versions on the same machine, what is not measured again stays.
    """

    def __init__(self, named: str, versions: dict[str, str], **more: Any) -> None:
        self.named, self.versions, self.more = named, versions, more
        earlier = earlier_result(named, versions)
        self.rows: list[Row] = earlier.get("rows", [])
        self.left_out: list[Row] = earlier.get("left_out", [])
        self.failed: list[Row] = []
        self.found: list[Row] = []  # in this run

    def add(self, rows: Iterable[Row]) -> None:
        """Keep rows in the place of older ones of the same case."""
        rows = list(rows)
        self._forget(map(place, rows))
        self.rows += rows
        self.found += rows
        self.save()

    def leave_out(self, case: Row, reason: str) -> None:
        """Note that a case has no row, and why."""
        self._forget([place(case)])
        self.left_out.append({**case, "reason": reason})
        self.save()

    def attempt(self, case: Row, work: Callable[[], Any]) -> Any:
        """Return what ``work`` returns, or None where it fails: that loses this case and no other."""
        try:
            return work()
        except Exception as error:
            said = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            if not any(words in said for words in NO_MEMORY):
                traceback.print_exc()
                self.failed.append(case)
        self.leave_out(case, said)
        return None

    def save(self) -> None:
        """Write what there is."""
        keep(self.named, self.versions, {**self.more, "left_out": self.left_out, "rows": self.rows})

    def end(self) -> None:
        """Fail where a case failed for another reason than too little memory."""
        if self.failed:
            raise typer.Exit(1)

    def _forget(self, places: Iterable[tuple[Any, ...]]) -> None:
        gone = set(places)
        self.rows = [row for row in self.rows if place(row) not in gone]
        self.left_out = [row for row in self.left_out if place(row) not in gone]


def earlier_result(named: str, versions: dict[str, str]) -> Row:
    """Read what was kept before, where it was by the same versions on the same machine."""
    path = RESULTS / f"{named}.json"
    earlier = json.loads(path.read_text()) if path.exists() else {}
    return earlier if (earlier.get("machine"), earlier.get("versions")) == (machine(), versions) else {}


def chosen(asked: Iterable[str] | None, known: Iterable[str]) -> list[str]:
    """Names that begin with one that was asked for, in their order; all where nothing was.

    >>> chosen(["bert"], ["resnet50", "bert-large-128", "bert-large-512"])
    ['bert-large-128', 'bert-large-512']
    """
    known, asked = list(known), list(asked or [""])
    if unknown := [name for name in asked if not any(one.startswith(name) for one in known)]:
        raise typer.BadParameter(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
    return [one for one in known if any(one.startswith(name) for name in asked)]


def missing_table(left_out: Iterable[Row]) -> Table:
    """What has no row, and why."""
    shown = Table(*KEY, "left out because", box=SIMPLE_HEAD)
    for row in left_out:
        shown.add_row(*(str(part or "all") for part in place(row)), row["reason"])
    return shown


def published(models: Iterable[str]) -> list[Row]:
    """What others have measured of these models."""
    rows = json.loads(PUBLISHED.read_text())["rows"]
    return [row for model in dict.fromkeys(models) for row in rows if row["model"] == model]


def published_table(models: Iterable[str]) -> Table:
    """Others' numbers, to be read beside ours."""
    headings = ("model", "GPU", "batch", "float32 or TF32", "mixed", "ratio", "of")
    shown = Table(*headings, title="published by others, on their machines", box=SIMPLE_HEAD)
    for row in published(models):
        plain = f"{row['baseline']} {row['baseline_rate']:g}"
        mixed = f"{row['mixed']} {row['mixed_rate']:g} {row['unit']}"
        shown.add_row(row["model"], row["gpu"], str(row["batch"]), plain, mixed, f"{row['ratio']:.2f}", row["source"])
    return shown
