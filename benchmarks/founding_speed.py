"""The speed table: the models with a published speed-up, timed on a GPU by ``end_to_end.py`` at published shapes.

A row is a model of ``end_to_end.py`` in one way, eager or compiled: its speed-up over IEEE float32 and over TF32,
in both formats, with polyamp and with PyTorch's own autocast and scaler.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import keeping
from founding_results import SPEED, add, rows
from keeping import Row
from models import founding
from parts import registered

HERE = Path(__file__).parent
A_ROW = 540.0
"""Seconds for all models of a row; the program ends by itself within them."""
GRACE = 60.0
BASES = ("float32", "tf32")
FORMATS = ("float16", "bfloat16")
BY = ("polyamp", "native")


def timed_rows() -> list[founding.Row]:
    """Return the models for which a speed-up was published."""
    return [row for row in founding.ROWS if row.speed_up]


def measure(model: founding.Row) -> Iterator[Row]:
    """Time a model on the GPU within ten minutes, and keep a row for each of its ways."""
    for task in model.timed_as:
        within = A_ROW / len(model.timed_as)
        kept = run(task, keeping.RESULTS, "--within", f"{within:.0f}", limit=within + GRACE / len(model.timed_as))
        yield from (add(SPEED, row) for row in collected(model, task, kept))


def rehearse(model: founding.Row) -> Iterator[Row]:
    """Run tiny versions of a model on the CPU: a check that all of it runs. Nothing is kept."""
    with tempfile.TemporaryDirectory(prefix="polyamp-") as folder:
        for task in model.timed_as:
            kept = run(task, Path(folder), "--small", "--ways", "eager")
            yield from collected(model, task, kept)


def run(task: str, results: Path, *options: str, limit: float | None = None) -> Row:
    """Run ``end_to_end.py``, and return what it kept, which may be a part if it failed or did not end in time.

    Raises:
        RuntimeError: it kept no row of this task.
    """
    with tempfile.TemporaryDirectory(prefix="polyamp-") as folder, suppress(subprocess.TimeoutExpired):
        own = {"PYTHONPATH": registered(Path(folder)), "POLYAMP_RESULTS": str(results), "PYTHONSAFEPATH": ""}
        command = [sys.executable, str(HERE / "end_to_end.py"), "--model", task, *options]
        subprocess.run(command, env=os.environ | own, timeout=limit, check=False)
    kept = keeping.read(f"end_to_end_{'small' if '--small' in options else 'cuda'}", results)
    if not any(row["model"] == task for row in kept.get("rows", [])):
        raise RuntimeError(f"end_to_end.py kept no row of {task}")
    return kept


def collected(model: founding.Row, task: str, kept: Row) -> Iterator[Row]:
    """Return a row for each way in which a model was timed, from the results of ``end_to_end.py``."""
    of_task = [row for row in kept["rows"] if row["model"] == task]
    for way in dict.fromkeys(row["way"] for row in of_task):
        speed_up = {
            row["variant"]: {base: row[f"times_{base}"] for base in BASES} for row in of_task if row["way"] == way
        }
        place = {"name": f"{task}, {way}", "model": model.name, "task": task, "way": way}
        yield place | {"versions": kept["versions"], "speed_up": speed_up}


def measured() -> list[Row]:
    """Return all kept rows, in the order of the table."""
    found = rows(SPEED)
    return [row for model in timed_rows() for row in found if row["model"] == model.name]


def published(model: founding.Row) -> str:
    """Return the published speed-up in words."""
    said = model.speed_up
    return "" if said is None else f"{said.low:g}" if said.low == said.high else f"{said.low:g} to {said.high:g}"


def ratios(row: Row, low: str, base: str) -> str:
    """Return the speed-ups over a base in one format: polyamp's, then native mixed precision's."""
    values = (row["speed_up"].get(f"{by} {low}", {}).get(base) for by in BY)
    return " / ".join("–" if value is None else f"{value:.2f}" for value in values)
