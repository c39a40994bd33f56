"""What does autocast cost and save in JAX, compared with casts by hand? Four models, two formats.

For each way to train: the time of a step (gradient and SGD update, compiled, donated), of the first call (trace, lower,
compile), the bytes kept for the backward pass, and the error of the gradients against float64.

    python benchmarks/jax_autocast.py [--quick]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import jax
import numpy as np
import typer
from interleave import Timing, calls_in, compared, console, interleave, turns
from jax_models import MODELS, Task, Variant, exact_gradient, mpx, task, variants
from keeping import keep, machine
from rich.box import SIMPLE_HEAD
from rich.table import Table

import polyamp

LOSS_SCALES = {"bfloat16": 1.0, "float16": 1024.0}
STAGES = ("trace", "lower", "compile")
RETRACES = 3  # of all first calls: these take a tenth of the time
GOALS = {"step_ratio": 1.00, "saved_ratio": 1.05, "trace_ratio": 1.5, "retrace_ratio": 1.5}
BY_HAND = ("jmp", "flax dtype=", "mpx")
Row = dict[str, Any]


def rows(name: str, model: Task, low: str, rounds: int, compiles: int) -> list[Row]:
    """Return a row for each variant of one model in one format, with all measurements."""
    ways = variants(model, low, LOSS_SCALES[low])
    steps = step_times(f"{name} {low}: steps", model, ways, LOSS_SCALES[low], rounds)
    calls = first_calls(f"{name} {low}: first calls", model, ways, compiles)
    exact = exact_gradient(model)
    found = []
    for way in ways.values():
        row: Row = {"model": name, "format": low, "variant": way.name}
        row |= steps[way.name] | calls[way.name]
        row["saved_bytes"] = way.bytes_saved(*model.arguments())
        row["gradient_error"] = float(f"{gradient_error(way, model, exact, LOSS_SCALES[low]):.3g}")
        found.append(row)
    flax = next(row["saved_bytes"] for row in found if row["variant"] == "flax dtype=")
    return [row | {"saved_ratio": round(row["saved_bytes"] / flax, 3)} for row in found]


def step_times(question: str, model: Task, ways: dict[str, Variant], loss_scale: float, rounds: int) -> dict[str, Row]:
    """Return milliseconds of a step, and their ratio in each round to the fastest way that casts by hand."""
    latest: list[Any] = []

    def settle() -> None:
        jax.block_until_ready(latest)

    runs = {name: stepper(way, model, 1e-3 / loss_scale, latest) for name, way in ways.items()}
    timings = interleave(question, runs, rounds, calls_in(0.1, runs["float32"], settle), settle)
    taken = {timing.variant: timing.microseconds for timing in timings}
    best = min((name for name in BY_HAND if name in taken), key=lambda name: statistics.median(taken[name]))
    return {timing.variant: step_row(timing) for timing in compared(question, taken, best)}


def step_row(timing: Timing) -> Row:
    summary = timing.summary()
    return {
        "step_ms": round(summary["microseconds"] / 1e3, 3),
        "step_ratio": summary["ratio"],
        "step_ratio_10_to_90_percent": summary["ratio_10_to_90_percent"],
    }


def stepper(way: Variant, model: Task, rate: float, latest: list[Any]) -> Callable[[], None]:
    """Return a call that trains one step; its parameters and state are appended to ``latest``."""

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        _, state, grads = way.gradient(params, state, batch)
        return jax.tree.map(lambda param, grad: param - rate * grad, params, grads), state

    compiled = jax.jit(step, donate_argnums=(0, 1))
    params, state, batch = model.arguments()
    held = [params, state]
    latest.append(held)

    def run() -> None:
        held[:] = compiled(*held, batch)

    return run


def first_calls(question: str, model: Task, ways: dict[str, Variant], rounds: int) -> dict[str, Row]:
    """Return milliseconds to trace, lower and compile a gradient: the least of all rounds, and ratios to float32.

    JAX caches the traces of its own functions, such as ``jnp.where``. A first call is without them; a retrace has them.
    """
    arguments = model.arguments()
    first: dict[str, list[list[float]]] = {name: [] for name in ways}
    again: dict[str, list[list[float]]] = {name: [] for name in ways}
    for name in turns(ways, rounds, question):
        jax.clear_caches()
        first[name].append(stages(ways[name], arguments))
        again[name] += [stages(ways[name], arguments, only_trace=True) for _ in range(RETRACES)]
    least = {name: [*np.min(first[name], axis=0), np.min(again[name])] for name in ways}
    return {name: first_call_row(times, least["float32"]) for name, times in least.items()}


def first_call_row(times: list[float], plain: list[float]) -> Row:
    row: Row = {f"{stage}_ms": round(float(taken), 1) for stage, taken in zip((*STAGES, "retrace"), times, strict=True)}
    row["trace_ratio"] = round(float(times[0] / plain[0]), 3)
    row["retrace_ratio"] = round(float(times[-1] / plain[-1]), 3)
    row["first_call_ratio"] = round(float(sum(times[:-1]) / sum(plain[:-1])), 3)
    return row


def stages(way: Variant, arguments: Any, only_trace: bool = False) -> list[float]:
    """Return milliseconds of each of `STAGES`, or of the first, for a function that JAX has not seen before."""

    def fresh(*own: Any) -> Any:
        return way.gradient(*own)

    marks = [time.perf_counter()]
    traced = jax.jit(fresh).trace(*arguments)
    marks.append(time.perf_counter())
    if not only_trace:
        lowered = traced.lower()
        marks.append(time.perf_counter())
        lowered.compile()
        marks.append(time.perf_counter())
    return [float(taken) * 1e3 for taken in np.diff(marks)]


def gradient_error(way: Variant, model: Task, exact: Any, loss_scale: float) -> float:
    """Return the norm of the error of all gradients, divided by the norm of the exact ones."""
    _, _, grads = jax.jit(way.gradient)(*model.arguments())
    ours, theirs = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]) for tree in (grads, exact))
    return float(np.linalg.norm(ours.astype(np.float64) / loss_scale - theirs) / np.linalg.norm(theirs))


def table(found: Iterable[Row], low: str) -> Table:
    """Return a table of the rows of one format."""
    caption = (
        "by hand: against the fastest of jmp, flax and mpx, with the 10th and 90th percentile of all rounds. "
        "trace: of the first call; again: its ratio with JAX's caches warm; first: with lowering and compilation. "
        "MB: kept for the backward pass. error: of the gradients, against float64."
    )
    shown = Table(title=f"{low} on {machine_line()}", caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("model", "variant"):
        shown.add_column(heading, no_wrap=True)
    for heading in (
        *("step ms", "by hand", "10-90 %", "trace ms", "/ f32", "again", "first ms", "/ f32"),
        *("MB", "/ flax", "error"),
    ):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in found:
        if row["format"] == low:
            shown.add_row(*cells(row), end_section=row["variant"] == "polyamp")
    return shown


def cells(row: Row) -> list[str]:
    least, most = row["step_ratio_10_to_90_percent"]
    return [
        row["model"],
        row["variant"],
        f"{row['step_ms']:.2f}",
        f"{row['step_ratio']:.2f}",
        f"{least:.2f}-{most:.2f}",
        f"{row['trace_ms']:.0f}",
        f"{row['trace_ratio']:.2f}",
        f"{row['retrace_ratio']:.2f}",
        f"{sum(row[f'{stage}_ms'] for stage in STAGES):.0f}",
        f"{row['first_call_ratio']:.2f}",
        f"{row['saved_bytes'] / 1e6:.2f}",
        f"{row['saved_ratio']:.2f}",
        f"{row['gradient_error']:.0e}",
    ]


def machine_line() -> str:
    """Return the machine and the versions on which the steps ran."""
    known = machine()
    processor = f"{known['processor']} ({known['cores']} cores)"
    return f"{known['gpu'] if jax.default_backend() == 'gpu' else processor}, JAX {jax.__version__}"


def goals(found: Iterable[Row]) -> Table:
    """Return how far polyamp is from its goals."""
    headings = [f"{what.replace('_', ' ')} <= {goal:.2f}" for what, goal in GOALS.items()]
    shown = Table("model", "format", *headings, title="polyamp and its goals", box=SIMPLE_HEAD)
    for row in found:
        if row["variant"] == "polyamp":
            marks = (f"[{'green' if row[what] <= goal else 'red'}]{row[what]:.2f}" for what, goal in GOALS.items())
            shown.add_row(row["model"], row["format"], *marks)
    return shown


def main(
    model: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(MODELS)}; may be repeated.")] = None,
    low: Annotated[list[str] | None, typer.Option("--format", help="bfloat16 or float16; may be repeated.")] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of steps.")] = 25,
    compiles: Annotated[int, typer.Option(min=1, help="Rounds of first calls.")] = 5,
    scale: Annotated[int, typer.Option(min=1, help="Multiplies widths and batches, for a GPU.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Two rounds of each; no results are kept.")] = False,
) -> None:
    """Measure, print, and keep the numbers in results/jax_autocast_<platform>.json."""
    if mpx is None:
        console().print("mpx is left out: pip install mixed_precision_for_JAX", style="yellow")
    if quick:
        rounds, compiles = 2, 1
    found: list[Row] = []
    for name in model or MODELS:
        chosen = task(name, scale)
        for each in low or LOSS_SCALES:
            found += rows(name, chosen, each, rounds, compiles)
            if not quick:
                keep(f"jax_autocast_{jax.default_backend()}", versions(), {"scale": scale, "rows": found})
    for each in low or LOSS_SCALES:
        console().print(table(found, each))
    console().print(goals(found))


def versions() -> dict[str, str]:
    import flax
    import jmp

    known = {"polyamp": polyamp, "jax": jax, "flax": flax, "jmp": jmp}
    return {name: module.__version__ for name, module in (known | ({"mpx": mpx} if mpx else {})).items()}


if __name__ == "__main__":
    typer.run(main)
