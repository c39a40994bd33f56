"""Keep the rows of the founding tables, each with the machine and the versions that it ran on.

Unlike other results, rows of several machines and people stand in one file: each is a verdict of its own, and none is a
time that others are compared with. `add` reads the file again before it writes, so programs that measure different
models may run at the same time; `gather` takes over the rows of other folders.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import keeping
from keeping import Row, machine

FRAMEWORKS = {"torch": "PyTorch", "jax": "JAX", "keras": "Keras on TensorFlow"}
PACKAGES = {
    "torch": ("torch", "transformers"),
    "jax": ("jax", "jaxlib", "optax", "flax"),
    "keras": ("keras", "tensorflow", "tensorflow-cpu"),
}
ACCURACY, NEW_SEEDS = "founding_accuracy_{}", "founding_new_seeds_{}"
LSTM, SPEED = "founding_lstm_{}", "founding_speed"
FILES = (*(name.format(framework) for name in (ACCURACY, NEW_SEEDS, LSTM) for framework in FRAMEWORKS), SPEED)


def rows(name: str, folder: Path | None = None) -> list[Row]:
    """Return the rows of a file; none if there is no such file."""
    return keeping.read(name, folder).get("rows", [])


def add(name: str, row: Row) -> Row:
    """Keep a row, which replaces the one of the same name, with the machine and the time; return all of it."""
    whole = row | {"machine": machine(), "finished": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())}
    _write(name, [*rows(name), whole])
    return whole


def gather(folders: Iterable[Path]) -> dict[str, list[str]]:
    """Take over the rows of other folders of results, the newest of each name; return the names by file."""
    folders, taken = list(folders), {}
    for name in FILES:
        own = rows(name)
        found = sorted([*own, *(row for folder in folders for row in rows(name, folder))], key=_finished)
        newest = {row["name"]: row for row in found}
        if new := [row for row in newest.values() if row not in own]:
            _write(name, found)
            taken[name] = [row["name"] for row in new]
    return taken


def versions(framework: str) -> dict[str, str]:
    """Return the versions of polyamp and of what a framework's models run on, without importing it."""
    return {name: found for name in ("polyamp", "numpy", *PACKAGES[framework]) if (found := _version(name))}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _finished(row: Row) -> str:
    return row["finished"]


def _write(name: str, found: list[Row]) -> None:
    """Write the last row of each name, sorted by name."""
    last: dict[str, Any] = {row["name"]: row for row in found}
    keeping.write(name, {"rows": [last[key] for key in sorted(last)]})
