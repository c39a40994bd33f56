"""Keep results: one JSON file for each benchmark, with the machine and the versions that it ran on.

Results are kept in ``benchmarks/results``, or in the folder that ``POLYAMP_RESULTS`` names. A short benchmark writes
its numbers once, by `keep`. A long one adds rows to a `Keeper`, which writes them as they come: a run that is stopped,
and started again for the rest, loses nothing.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import shutil
import subprocess
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer
from interleave import Timing, console
from rich.box import SIMPLE_HEAD
from rich.table import Table

RESULTS = Path(os.environ.get("POLYAMP_RESULTS") or Path(__file__).parent / "results").absolute()
DRIVER = Path("/proc/driver/nvidia")
NO_MEMORY = ("OutOfMemoryError", "RESOURCE_EXHAUSTED")
OF_MODELS = ("model", "way", "variant")
Row = dict[str, Any]


def keep(name: str, versions: dict[str, str], numbers: dict[str, Any]) -> Path:
    """Write ``<name>.json``: the machine, the versions, also that of the flow rule, and the numbers."""
    return write(name, {**_measured_with(versions), **numbers})


def _measured_with(versions: dict[str, str]) -> dict[str, Any]:
    from polyamp.operations import RULE_VERSION  # gpu.py runs by a Python that finds polyamp only for its parts

    return {"machine": machine(), "versions": {**versions, "flow rule": RULE_VERSION}}


def write(name: str, content: dict[str, Any]) -> Path:
    return replace(name, json.dumps(content, indent=2) + "\n")


def replace(name: str, text: str) -> Path:
    """Write ``<name>.json`` as a whole, so that a program that is stopped leaves the earlier one."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    whole = path.with_suffix(".part")
    whole.write_text(text)
    whole.replace(path)
    return path


def read(name: str, folder: Path | None = None) -> dict[str, Any]:
    """Return what was kept as ``<name>.json``; an empty dict if nothing was."""
    path = (folder or RESULTS) / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


class Keeper:
    """Rows that are written to ``results/<name>.json`` as soon as they are measured.

    Rows of an earlier run with the same versions on the same machine stay, unless they are measured again.

    Args:
        name: of the file.
        versions: by package.
        key: the columns that name a case. A case without one of them stands for all its values.
        **more: other numbers for the file.
    """

    def __init__(self, name: str, versions: dict[str, str], key: Sequence[str] = OF_MODELS, **more: Any) -> None:
        self.name, self.versions, self.key, self.more = name, versions, key, more
        earlier = earlier_result(name, versions)
        self.rows: list[Row] = earlier.get("rows", [])
        self.left_out: list[Row] = earlier.get("left_out", [])
        self.failed: list[Row] = []
        self.found: list[Row] = []  # in this run

    def add(self, rows: Iterable[Row]) -> None:
        """Keep rows, which replace older ones of the same cases."""
        rows = list(rows)
        self._forget(rows)
        self.rows += rows
        self.found += rows
        self.save()

    def leave_out(self, case: Row, reason: str) -> None:
        """Record that a case has no row, and why."""
        self._forget([case])
        self.left_out.append({**case, "reason": reason})
        self.save()

    def attempt(self, case: Row, work: Callable[[], Any]) -> Any:
        """Return the result of ``work``, or None if it fails: then only this case is lost."""
        try:
            return work()
        except Exception as error:
            message = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            if not any(words in message for words in NO_MEMORY):
                traceback.print_exc()
                self.failed.append(case)
        self.leave_out(case, message)
        return None

    def save(self) -> None:
        """Write the file."""
        keep(self.name, self.versions, {**self.more, "left_out": self.left_out, "rows": self.rows})

    def end(self) -> None:
        """Fail if a case failed for another reason than too little memory."""
        if self.failed:
            raise typer.Exit(1)

    def missing_table(self) -> Table:
        """Return a table of the cases without a row, with the reasons."""
        shown = Table(*self.key, "left out because", box=SIMPLE_HEAD)
        for row in self.left_out:
            shown.add_row(*(str(part or "all") for part in self._case(row)), row["reason"])
        return shown

    def _case(self, row: Row) -> tuple[Any, ...]:
        return tuple(row.get(key) for key in self.key)

    def _forget(self, cases: Iterable[Row]) -> None:
        gone = set(map(self._case, cases))
        self.rows = [row for row in self.rows if self._case(row) not in gone]
        self.left_out = [row for row in self.left_out if not any(_covers(self._case(row), case) for case in gone)]


def _covers(left_out: tuple[Any, ...], case: tuple[Any, ...]) -> bool:
    return all(one is None or one == other for one, other in zip(left_out, case, strict=True))


def earlier_result(name: str, versions: dict[str, str]) -> Row:
    """Read what was kept before, if it is of the same versions and the same machine; else return an empty dict."""
    earlier = read(name)
    return earlier if _measured_with(versions).items() <= earlier.items() else {}


def publish(name: str, timings: list[Timing], versions: dict[str, str]) -> None:
    """Print a table of timings, and keep them."""
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
    """Keep the timings so far; called before the next case starts."""
    keep(name, versions, {"timings": [timing.summary() for timing in timings]})


@functools.cache
def machine() -> dict[str, Any]:
    """Return the processor, its cores, and the GPU and its driver if there is one, as results name them."""
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
    """Return what nvidia-smi reports; if it is missing or does not answer, what the driver's own files have."""
    tool = shutil.which("nvidia-smi")
    asked = [str(tool), "--query-gpu=name,driver_version", "--format=csv,noheader"]
    with suppress(subprocess.SubprocessError):
        answer = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout if tool else ""
        name, _, driver = answer.partition("\n")[0].rpartition(", ")
        if name:
            return {"gpu": name, "driver": driver}
    texts = [path.read_text() for path in sorted(DRIVER.glob("gpus/*/information"))]
    names = re.findall(r"^Model:\s*(.+?)\s*$", "\n".join(texts), re.MULTILINE)
    return {"gpu": names[0], "driver": (DRIVER / "version").read_text().partition("\n")[0]} if names else {}
