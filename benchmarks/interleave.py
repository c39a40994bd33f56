"""Time variants of the same work side by side in one process, and keep the result with the machine it ran on."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Timing:
    """One variant: microseconds of one call in every round, and each round's ratio to the first variant."""

    question: str
    variant: str
    microseconds: list[float]
    ratios: list[float]

    def summary(self) -> dict[str, Any]:
        low, *_, high = statistics.quantiles(self.ratios, n=10)
        return {
            "question": self.question,
            "variant": self.variant,
            "microseconds": round(statistics.median(self.microseconds), 2),
            "ratio": round(statistics.median(self.ratios), 3),
            "ratio_10_to_90_percent": [round(low, 3), round(high, 3)],
        }


def interleave(
    question: str,
    variants: dict[str, Callable[[], Any]],
    rounds: int,
    calls: int,
    settle: Callable[[], Any] = lambda: None,
) -> list[Timing]:
    """Time every variant once a round, in an order that rotates, so that load and clock changes hit all of them alike.

    The first variant is what the others are compared with, within each round. ``settle`` waits until a device is idle.
    """
    names = list(variants)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for fn in variants.values():
        for _ in range(3):
            fn()
        settle()
    for turn in track(range(rounds), description=question):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            fn, start = variants[name], time.perf_counter()
            for _ in range(calls):
                fn()
            settle()
            taken[name].append((time.perf_counter() - start) / calls * 1e6)
    base = taken[names[0]]
    return [
        Timing(question, name, taken[name], [own / other for own, other in zip(taken[name], base, strict=True)])
        for name in names
    ]


def machine() -> dict[str, Any]:
    """The processor and its cores, as the results name them."""
    model = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def publish(name: str, timings: list[Timing], versions: dict[str, str]) -> None:
    """Print a table, and write ``results/<name>.json`` with the machine and the versions."""
    table = Table("question", "variant", "µs", "ratio", "10 % - 90 %", title=str(machine()))
    summaries = [timing.summary() for timing in timings]
    for row in summaries:
        low, high = row["ratio_10_to_90_percent"]
        table.add_row(
            row["question"], row["variant"], str(row["microseconds"]), f"{row['ratio']:.2f}", f"{low:.2f} - {high:.2f}"
        )
    (Console() if sys.stdout.isatty() else Console(width=120)).print(table)
    RESULTS.mkdir(exist_ok=True)
    kept = {"machine": machine(), "versions": versions, "timings": summaries}
    (RESULTS / f"{name}.json").write_text(json.dumps(kept, indent=2) + "\n")
