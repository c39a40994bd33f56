"""Time variants of the same work side by side in one process, and keep the result with the machine it ran on."""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
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
        low, *_, high = statistics.quantiles(self.ratios, n=10, method="inclusive")
        return {
            "question": self.question,
            "variant": self.variant,
            "microseconds": round(statistics.median(self.microseconds), 2),
            "least_microseconds": round(min(self.microseconds), 2),
            "ratio": round(statistics.median(self.ratios), 3),
            "ratio_10_to_90_percent": [round(low, 3), round(high, 3)],
        }


def turns(names: Iterable[str], rounds: int, question: str) -> Iterator[str]:
    """Every name once a round, in an order that rotates, so that load and clock changes hit all of them alike."""
    order = list(names)
    for turn in track(range(rounds), description=question, console=console()):
        shift = turn % len(order)
        yield from order[shift:] + order[:shift]


def calls_in(seconds: float, run: Callable[[], None], settle: Callable[[], None]) -> int:
    """How many calls take about so long."""
    run()
    settle()
    start = time.perf_counter()
    run()
    settle()
    return max(1, round(seconds / (time.perf_counter() - start)))


def interleave(
    question: str,
    variants: dict[str, Callable[[], Any]],
    rounds: int,
    calls: int,
    settle: Callable[[], Any] = lambda: None,
) -> list[Timing]:
    """Time every variant once a round; ``settle`` waits until a device is idle.

    The first variant is what the others are compared with, within each round.
    """
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for fn in variants.values():
        for _ in range(3):
            fn()
        settle()
    for name in turns(variants, rounds, question):
        fn, start = variants[name], time.perf_counter()
        for _ in range(calls):
            fn()
        settle()
        taken[name].append((time.perf_counter() - start) / calls * 1e6)
    return compared(question, taken)


def compared(question: str, taken: dict[str, list[float]], base: str | None = None) -> list[Timing]:
    """Microseconds of every round, compared round by round with those of ``base``, or of the first variant."""
    yardstick = taken[base or next(iter(taken))]
    return [
        Timing(question, name, own, [one / other for one, other in zip(own, yardstick, strict=True)])
        for name, own in taken.items()
    ]


def machine() -> dict[str, Any]:
    """The processor and its cores, and the GPU and its driver where there is one, as the results name them."""
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
        **_gpu(),
    }


def _gpu() -> dict[str, str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    asked = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=False)
    if answer.returncode:
        return {}
    name, driver = answer.stdout.splitlines()[0].split(", ")
    return {"gpu": name, "driver": driver}


def console() -> Console:
    """As wide as the terminal; wide enough for the tables where there is none."""
    return Console() if sys.stdout.isatty() else Console(width=120)


def publish(name: str, timings: list[Timing], versions: dict[str, str]) -> None:
    """Print a table, and write ``results/<name>.json`` with the machine and the versions."""
    table = Table("question", "variant", "µs", "ratio", "10 % - 90 %", title=str(machine()))
    summaries = [timing.summary() for timing in timings]
    for row in summaries:
        low, high = row["ratio_10_to_90_percent"]
        table.add_row(
            row["question"], row["variant"], str(row["microseconds"]), f"{row['ratio']:.2f}", f"{low:.2f} - {high:.2f}"
        )
    console().print(table)
    keep(name, versions, {"timings": summaries})


def keep(name: str, versions: dict[str, str], numbers: dict[str, Any]) -> Path:
    """Write ``results/<name>.json``: the machine, the versions and the numbers."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), "versions": versions, **numbers}, indent=2) + "\n")
    return path
