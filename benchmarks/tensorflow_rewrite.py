"""What does rewriting a training step cost and save in TensorFlow, in bfloat16? Six models, four ways.

Compared are float32, the whole step rewritten by polyamp, Keras' own mixed_bfloat16, and TensorFlow's graph pass. For
each way the time of a step, interleaved; for polyamp's, the time to decide and write the graph and, in float16 too, the
casts and the bytes that the graph's operations read and write, as if nothing was fused.

    python benchmarks/tensorflow_rewrite.py [--quick]
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Annotated, Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf
import typer
from interleave import compared, console, interleave
from keeping import keep, machine
from rich.box import SIMPLE_HEAD
from rich.table import Table
from tensorflow_models import MODELS, Task, task

import polyamp
from polyamp.plan import Plan

POLICY = "mixed_bfloat16"
OTHERS = ("float32", "Keras policy", "TensorFlow's pass")
Row = dict[str, Any]


def rows(name: str, rounds: int) -> list[Row]:
    """Return a row for each way to train one model."""
    written, lowered = task(name), task(name, POLICY)
    ours, rewriting = rewritten(written)
    runs = {
        "float32": tf.function(written.step),
        "polyamp": ours,
        "Keras policy": tf.function(lowered.step),
        "TensorFlow's pass": with_pass(tf.function(written.step)),
    }
    steps = step_times(name, {way: caller(run, written.batch) for way, run in runs.items()}, rounds)
    found = {way: {"model": name, "variant": way, **steps[way]} for way in runs}
    found["polyamp"] |= rewriting
    concrete = tf.function(written.step).get_concrete_function(*written.batch)
    for policy in ("mixed_bfloat16", "mixed_float16"):
        found["polyamp"] |= moved(policy, polyamp.explain(concrete, *written.batch, policy=policy))
    return list(found.values())


def rewritten(written: Task) -> tuple[Any, Row]:
    """Return the rewritten step, and the seconds to trace it, and to decide and write its graph: the least of three."""
    start = time.perf_counter()
    concrete = tf.function(written.step).get_concrete_function(*written.batch)
    traced = time.perf_counter() - start
    graph, seconds = concrete.graph.as_graph_def(), []
    for _ in range(3):
        start = time.perf_counter()
        polyamp.rewrite(graph, policy=POLICY)
        seconds.append(time.perf_counter() - start)
    ours = polyamp.rewrite(written.step, *written.batch, policy=POLICY, backend="tensorflow")
    return ours, {
        "nodes": len(graph.node),
        "trace_seconds": round(traced, 3),
        "rewrite_seconds": round(min(seconds), 3),
        "rewrite_seconds_first": round(seconds[0], 3),
    }


def with_pass(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls another one with TensorFlow's graph pass for bfloat16 on CPUs enabled."""
    name = "auto_mixed_precision_onednn_bfloat16"

    def call(*batch: Any) -> Any:
        tf.config.optimizer.set_experimental_options({name: True})
        try:
            return run(*batch)
        finally:
            tf.config.optimizer.set_experimental_options({name: False})

    return call


def caller(run: Callable[..., Any], batch: tuple[Any, ...]) -> Callable[[], Any]:
    """Return a call that waits until the step has ended."""
    return lambda: run(*batch).numpy()


def step_times(name: str, runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Row]:
    """Return milliseconds of a step, and their ratio in each round to the fastest of the other ways."""
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


def moved(policy: str, plan: Plan) -> Row:
    """Return the casts of a plan, and the bytes that the graph moves, ratio to float32."""
    totals = plan.totals
    ratio = totals["bytes_moved"] / totals["bytes_moved_float32"]
    return {f"{policy}: casts": totals["casts"], f"{policy}: bytes_moved_ratio": round(ratio, 3)}


def show(found: list[Row]) -> None:
    """Print all measurements."""
    head = ("model", "way", "step ms", "ratio", "10 % - 90 %", "rewrite s", "nodes", "bytes bf16", "bytes f16")
    table = Table(*head, box=SIMPLE_HEAD, title=str(machine()))
    for row in found:
        low, high = row["step_ratio_10_to_90_percent"]
        table.add_row(
            row["model"],
            row["variant"],
            f"{row['step_ms']:.1f}",
            f"{row['step_ratio']:.2f}",
            f"{low:.2f} - {high:.2f}",
            f"{row['rewrite_seconds']:.2f}" if "nodes" in row else "",
            str(row.get("nodes", "")),
            *(
                f"{ratio:.2f}" if (ratio := moves(row, policy)) else ""
                for policy in ("mixed_bfloat16", "mixed_float16")
            ),
        )
    console().print(table)


def moves(row: Row, policy: str) -> float:
    """Return the bytes moved, ratio to float32; 0 if there is no graph to look at."""
    return float(row.get(f"{policy}: bytes_moved_ratio", 0))


def main(
    quick: Annotated[bool, typer.Option(help="few rounds, and only the small models")] = False,
) -> None:
    names = list(MODELS)[:4] if quick else list(MODELS)
    found = [row for name in names for row in rows(name, rounds=4 if quick else 15)]
    show(found)
    if not quick:
        device = "gpu" if tf.config.list_physical_devices("GPU") else "cpu"
        versions = {"tensorflow": tf.__version__, "keras": keras.__version__, "polyamp": polyamp.__version__}
        keep(f"tensorflow_rewrite_{device}", versions, {"policy": POLICY, "rows": found})


if __name__ == "__main__":
    typer.run(main)
