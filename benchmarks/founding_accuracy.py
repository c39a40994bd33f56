"""The accuracy table: every model, trained over seeds in float32 and in 16 bits, and compared by `polyamp.parity`.

A row has the metrics and the seconds of every run, and the comparison of each policy with float32.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import keeping
from founding_results import ACCURACY, FRAMEWORKS, NEW_SEEDS, add, rows, versions
from keeping import Row, machine
from models import founding

import polyamp

COLOURS = {"mixed_float16": "#1f5fa8", "mixed_bfloat16": "#c06c1f"}
POLICIES = tuple(COLOURS)
OF_PARITY = ("metric", "better", "alpha", "paired", "seeds", "float32", "comparisons")
Train = Callable[[polyamp.Policy, int], dict[str, float]]


def module_of(framework: str, name: str) -> str:
    return f"models.on_{framework}.{name}"


def is_written(framework: str, name: str) -> bool:
    """Return whether a framework has a model."""
    return find_spec(module_of(framework, name)) is not None


def name_of(policy: str) -> str:
    """Return a policy's text without its rules and its loss scale."""
    return policy.partition(" ")[0]


def timed(train: Train) -> Train:
    """Return the training function with the seconds that it takes among its metrics."""

    @functools.wraps(train)
    def run(policy: polyamp.Policy, seed: int) -> dict[str, float]:
        start = time.perf_counter()
        metrics = train(policy, seed)
        return {**metrics, "seconds": round(time.perf_counter() - start, 3)}

    return run


def measure(framework: str, model: founding.Row, seeds: range, progress: bool = True) -> Row:
    """Train a model with all its seeds under every policy, compare, and return the row.

    Until `keep` the runs are kept in a file, from which a row that was interrupted goes on.
    """
    keeping.RESULTS.mkdir(parents=True, exist_ok=True)
    compared = polyamp.parity(
        timed(import_module(module_of(framework, model.name)).train),
        list(POLICIES),
        first_seed=seeds.start,
        seeds=len(seeds),
        margin=founding.margin_of(model.metric),
        metric=model.metric,
        controls=False,
        stop_early=False,
        keep=runs_of(framework, model, seeds),
        progress=progress,
    )
    found = compared.as_dict()
    row = {"name": model.name, "framework": framework, "first_seed": seeds.start, "versions": versions(framework)}
    return row | {key: found[key] for key in OF_PARITY}


def keep(framework: str, model: founding.Row, seeds: range, row: Row) -> Row:
    """Keep a measured row in place of its single runs."""
    kept = add(files_of(seeds).format(framework), row)
    runs_of(framework, model, seeds).unlink()
    return kept


def files_of(seeds: range) -> str:
    """Return the files that rows of these seeds are kept in: `ACCURACY` if they begin with 0, else `NEW_SEEDS`."""
    return NEW_SEEDS if seeds.start else ACCURACY


def runs_of(framework: str, model: founding.Row, seeds: range) -> Path:
    """Return the file of the runs of a row that is not finished."""
    return keeping.RESULTS / f"founding_{framework}_{model.name}_{seeds.start}.part"


def runs_done(framework: str, model: founding.Row, seeds: range) -> int:
    """Return how many runs of a row that is not finished there are."""
    path = runs_of(framework, model, seeds)
    return path.read_text().count("\n") if path.exists() else 0


def earlier(framework: str, model: founding.Row, seeds: range) -> Row | None:
    """Return the kept row, if it has at least as many seeds and is of this machine and the same versions."""
    asked = (model.name, seeds.start, machine(), versions(framework))
    for row in rows(files_of(seeds).format(framework)):
        found = (row["name"], row["first_seed"], row["machine"], row["versions"])
        if found == asked and row["seeds"] >= len(seeds):
            return row
    return None


def measured(files: str = ACCURACY) -> Iterator[Row]:
    """Return all kept rows, by framework, in the order of the table.

    Args:
        files: `ACCURACY`, or `NEW_SEEDS` for the rows that were trained again with other seeds.
    """
    for framework in FRAMEWORKS:
        found = {row["name"]: row for row in rows(files.format(framework))}
        yield from (found[model.name] for model in founding.ROWS if model.name in found)


def draw(file: Path, files: str = ACCURACY) -> None:
    """Draw the interval of every comparison of some `measured` rows, in margins, in a panel for each framework."""
    from matplotlib.figure import Figure

    found = list(measured(files))
    panels = [name for name in FRAMEWORKS if any(row["framework"] == name for row in found)] or ["torch"]
    figure = Figure(figsize=(3.9 * len(panels) + 1.2, 0.42 * len(founding.ROWS) + 1.6), layout="constrained")
    axes: Any = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for axis, framework in zip(axes, panels, strict=True):
        axis.axvspan(-1, 1, color="#2e7d5b", alpha=0.12, linewidth=0, label="margin")
        axis.axvline(0, color="grey", linewidth=0.8)
        for row in (row for row in found if row["framework"] == framework):
            _draw_row(axis, row)
        axis.set(title=FRAMEWORKS[framework], xlabel="difference from float32, in margins", xlim=(-3, 3))
    axes[0].set_yticks(range(len(founding.ROWS)), [model.title for model in founding.ROWS])
    axes[0].invert_yaxis()
    known = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=len(known), frameon=False)
    figure.savefig(file, dpi=110)


def _draw_row(axis: Any, row: Row) -> None:
    """Draw the comparisons of a row; what lies outside of the panel is drawn at its edge, as an arrow."""
    place = [model.name for model in founding.ROWS].index(row["name"])
    for shift, way in zip((-0.15, 0.15), row["comparisons"], strict=True):
        name = name_of(way["policy"])
        if way["difference"] is None:
            axis.annotate("diverged", (1.2, place + shift), color=COLOURS[name], fontsize=7, va="center")
            continue
        mean, *ends = (value / way["margin"] for value in (way["difference"], *way["interval"]))
        axis.plot(ends, [place + shift] * 2, color=COLOURS[name])
        beyond = abs(mean) > 3
        marker = "<>"[mean > 0] if beyond else "o"
        axis.plot(max(-2.9, min(2.9, mean)), place + shift, marker, color=COLOURS[name], markersize=4, label=name)
