"""What does rewriting a training step cost and save in TensorFlow, in bfloat16? Six models, four ways.

Beside float32: the whole step rewritten by polyamp, Keras' own mixed_bfloat16, and TensorFlow's graph pass. Of each
way the time of a step, interleaved; of polyamp's, the time to decide and write the graph; and of both rewrites the
casts and the bytes that the graph moves.

    python benchmarks/tensorflow_rewrite.py [--quick] [--plot FILE]
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf
import typer
from interleave import compared, console, interleave, keep, machine
from rich.box import SIMPLE_HEAD
from rich.table import Table
from tensorflow_models import MODELS, Task, task

import polyamp
from polyamp.plan import Plan, in_bytes

POLICY = "mixed_bfloat16"
OTHERS = ("float32", "Keras policy", "TensorFlow's pass")
Row = dict[str, Any]


def rows(name: str, rounds: int) -> list[Row]:
    """One model: a row for each way to train it."""
    written, lowered = task(name), task(name, POLICY)
    ours, rewriting = rewritten(written)
    theirs = polyamp.rewrite(written.step, *written.batch, policy=POLICY, engine="grappler", backend="tensorflow")
    runs = {
        "float32": tf.function(written.step),
        "polyamp": ours,
        "Keras policy": tf.function(lowered.step),
        "TensorFlow's pass": theirs,
    }
    steps = step_times(name, {way: caller(run, written.batch) for way, run in runs.items()}, rounds)
    found = {way: {"model": name, "variant": way, **steps[way]} for way in runs}
    found["polyamp"] |= rewriting | moved(ours.plan)
    found["TensorFlow's pass"] |= moved(theirs.plan)
    found["float32"] |= {"bytes_moved": ours.plan.totals["bytes_moved_float32"]}
    return list(found.values())


def rewritten(written: Task) -> tuple[Any, Row]:
    """The step rewritten, and what that took beside tracing it."""
    start = time.perf_counter()
    concrete = tf.function(written.step).get_concrete_function(*written.batch)
    traced = time.perf_counter()
    again = polyamp.rewrite(concrete, *written.batch, policy=POLICY)
    done = time.perf_counter()
    ours = polyamp.rewrite(written.step, *written.batch, policy=POLICY, backend="tensorflow")
    del again
    return ours, {
        "nodes": len(concrete.graph.get_operations()),
        "trace_seconds": round(traced - start, 3),
        "rewrite_seconds": round(done - traced, 3),
    }


def caller(run: Callable[..., Any], batch: tuple[Any, ...]) -> Callable[[], Any]:
    """A call that ends when the step has."""
    return lambda: run(*batch).numpy()


def step_times(name: str, runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Row]:
    """Milliseconds of a step, and their ratio in each round to the fastest of the other ways."""
    taken = {timing.variant: timing.microseconds for timing in interleave(name, runs, rounds, calls=1)}
    best = min(OTHERS, key=lambda way: sorted(taken[way])[len(taken[way]) // 2])
    summaries = {timing.variant: timing.summary() for timing in compared(name, taken, best)}
    return {
        way: {
            "step_ms": round(summary["microseconds"] / 1e3, 2),
            "least_step_ms": round(summary["least_microseconds"] / 1e3, 2),
            "step_ratio": summary["ratio"],
            "step_ratio_10_to_90_percent": summary["ratio_10_to_90_percent"],
        }
        for way, summary in summaries.items()
    }


def moved(plan: Plan) -> Row:
    """Of a plan: casts, and bytes that the graph moves."""
    totals = plan.totals
    return {key: totals[key] for key in ("casts", "bytes_cast", "bytes_moved")}


def show(found: list[Row]) -> None:
    """Print all that was measured."""
    table = Table("model", "way", "step ms", "to the best other", "rewrite s", "casts", "moved", box=SIMPLE_HEAD)
    for row in found:
        low, high = row["step_ratio_10_to_90_percent"]
        table.add_row(
            row["model"],
            row["variant"],
            f"{row['step_ms']:.1f}",
            f"{row['step_ratio']:.2f} ({low:.2f} - {high:.2f})",
            f"{row['rewrite_seconds']:.2f} of {row['nodes']} nodes" if "nodes" in row else "",
            str(row.get("casts", "")),
            in_bytes(row["bytes_moved"]) if "bytes_moved" in row else "",
        )
    table.title = str(machine())
    console().print(table)


def draw(found: list[Row], file: Path) -> None:
    """Each model's steps, and what its graphs move, against float32's."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    ways = ("float32", "polyamp", "Keras policy", "TensorFlow's pass")
    for axis, key, title in zip(axes, ("step_ms", "bytes_moved"), ("time of a step", "bytes moved"), strict=True):
        for shift, way in enumerate(ways):
            heights = [ratio_to_float32(found, model, way, key) for model in MODELS]
            places = [index + 0.2 * (shift - 1.5) for index in range(len(MODELS))]
            axis.bar(places, heights, width=0.2, label=way)
        axis.set_xticks(range(len(MODELS)), list(MODELS), fontsize=8)
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set_title(f"{title}, ratio to float32")
    axes[0].legend(fontsize=8)
    figure.savefig(file, dpi=110)


def ratio_to_float32(found: list[Row], model: str, way: str, key: str) -> float:
    """0 where it was not measured."""
    values = {row["variant"]: row.get(key, 0) for row in found if row["model"] == model}
    return values.get(way, 0) / values["float32"] if values else 0.0


def main(
    quick: Annotated[bool, typer.Option(help="few rounds, and the small models alone")] = False,
    plot: Annotated[Path | None, typer.Option(help="draw the result")] = None,
) -> None:
    names = list(MODELS)[:4] if quick else list(MODELS)
    found = [row for name in names for row in rows(name, rounds=4 if quick else 15)]
    show(found)
    if not quick:
        device = "gpu" if tf.config.list_physical_devices("GPU") else "cpu"
        versions = {"tensorflow": tf.__version__, "keras": keras.__version__, "polyamp": polyamp.__version__}
        keep(f"tensorflow_rewrite_{device}", versions, {"policy": POLICY, "rows": found})
    if plot is not None:
        draw(found, plot)


if __name__ == "__main__":
    typer.run(main)
