"""Time variants of the same work side by side in one process, and keep the result with the machine it ran on.

Results are kept in ``benchmarks/results``, or in the folder that ``POLYAMP_RESULTS`` names.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

RESULTS = Path(os.environ.get("POLYAMP_RESULTS") or Path(__file__).parent / "results").absolute()
DRIVER = Path("/proc/driver/nvidia")
STARTED = time.perf_counter()


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


def time_is_up(within: float | None) -> bool:
    """Whether this program, of ``within`` seconds, should begin nothing more; never where it has no limit."""
    return within is not None and time.perf_counter() - STARTED >= within


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


@functools.cache
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
    """As nvidia-smi names it, or where that is absent or does not answer, the driver's own files."""
    tool = shutil.which("nvidia-smi")
    asked = [str(tool), "--query-gpu=name,driver_version", "--format=csv,noheader"]
    with suppress(subprocess.SubprocessError):
        answer = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout if tool else ""
        name, _, driver = answer.partition("\n")[0].rpartition(", ")
        if name:
            return {"gpu": name, "driver": driver}
    told = [path.read_text() for path in sorted(DRIVER.glob("gpus/*/information"))]
    names = re.findall(r"^Model:\s*(.+?)\s*$", "\n".join(told), re.MULTILINE)
    return {"gpu": names[0], "driver": (DRIVER / "version").read_text().partition("\n")[0]} if names else {}


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
    keep_timings(name, timings, versions)


def keep_timings(name: str, timings: list[Timing], versions: dict[str, str]) -> None:
    """Write what was timed so far, before the next case is tried."""
    keep(name, versions, {"timings": [timing.summary() for timing in timings]})


def keep(name: str, versions: dict[str, str], numbers: dict[str, Any], *, same: Sequence[str] = ()) -> Path:
    """Write ``<name>.json``: the machine, the versions and the numbers.

    The file appears whole or not at all, so that a program that is stopped leaves what it kept before.

    Args:
        name: of the file.
        versions: by package.
        numbers: what was measured.
        same: the keys that name a case. Rows of other cases that the file has already, of this machine and these
            versions, stay before the new ``numbers["rows"]``.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    if same:
        numbers = {**numbers, "rows": _others(path, versions, numbers["rows"], same) + numbers["rows"]}
    whole = path.with_suffix(".part")
    whole.write_text(json.dumps({"machine": machine(), "versions": versions, **numbers}, indent=2) + "\n")
    whole.replace(path)
    return path


def _others(path: Path, versions: dict[str, str], rows: list[dict[str, Any]], same: Sequence[str]) -> list[Any]:
    earlier = json.loads(path.read_text()) if path.exists() else {}
    if (earlier.get("machine"), earlier.get("versions")) != (machine(), versions):
        return []
    cases = [[row[key] for key in same] for row in rows]
    return [row for row in earlier["rows"] if [row.get(key) for key in same] not in cases]
