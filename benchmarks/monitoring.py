"""What does monitoring the loss scale cost? The counters of every step, and a check of them every 100 steps.

For each framework: the training step of an MLP, without and with `polyamp.HealthMonitor`; and with ``--against``, the
same with a checkout of a version without counters. Each version runs in its own process, in turns.

    python benchmarks/monitoring.py run [--part health] [--framework torch] [--against ../polyamp-before]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import typer
from interleave import Timing, compared, console, turns
from keeping import keep, keep_timings, publish
from monitored_steps import STEPS, Steps

HERE = Path(__file__).parents[1]
EVERY = 100
BEFORE, WITH = "without counters", "with counters"
Clock = Callable[[int], float]  # microseconds of one call, averaged over so many

app = typer.Typer(add_completion=False)


@contextmanager
def elsewhere(tree: Path, framework: str) -> Iterator[Callable[[str], Clock]]:
    """Run the same steps in another process, with the polyamp of a checkout."""
    command = [sys.executable, __file__, "serve", framework]
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, [str(tree.resolve()), os.environ.get("PYTHONPATH")]))}
    with subprocess.Popen(
        command, env=os.environ | paths, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        pipes = other.stdin, other.stdout
        if pipes[0] is None or pipes[1] is None:
            raise RuntimeError("the other process has no pipes")
        to, back = pipes

        def clock(what: str) -> Clock:
            def microseconds(calls: int) -> float:
                to.write(f"{what} {calls}\n")
                to.flush()
                return float(back.readline())

            return microseconds

        yield clock
        to.close()


@app.command(hidden=True)
def serve(framework: str) -> None:
    """Serve `elsewhere`: read the name of a step and a count, run it, and write the time."""
    steps = STEPS[framework]()
    for line in sys.stdin:
        what, calls = line.split()
        print(timed(steps, what, int(calls)), flush=True)


def timed(steps: Steps, what: str, calls: int) -> float:
    """Return microseconds of a ``step``, an ``update``, a step that is ``monitored``, or a ``look`` alone."""
    if what in ("step", "update"):
        return steps.microseconds(getattr(steps, what), calls)
    from polyamp.diagnosis.health import health  # the other version may not have it
    from polyamp.diagnosis.monitor import HealthMonitor

    if what == "look":
        return steps.microseconds(lambda: health(steps.holder()), calls)
    return steps.microseconds(steps.step, calls, HealthMonitor(every=EVERY, hooks=[str]))


def measured(question: str, clocks: dict[str, Clock], rounds: int, calls: int) -> list[Timing]:
    """Measure each once a round, in turns."""
    taken: dict[str, list[float]] = {name: [] for name in clocks}
    for clock in clocks.values():
        clock(max(3, calls // 10))
    for name in turns(clocks, rounds, question):
        taken[name].append(clocks[name](calls))
    return compared(question, taken)


def health(framework: str, against: Path | None, rounds: int) -> list[Timing]:
    """Measure the counters, and a monitor without hooks."""
    with ExitStack() as stack:
        now = stack.enter_context(elsewhere(HERE, framework))
        before = stack.enter_context(elsewhere(against, framework)) if against else None
        old = {what: {BEFORE: before(what)} if before else {} for what in ("step", "update")}
        training = {**old["step"], WITH: now("step"), f"and a look every {EVERY} steps": now("monitored")}
        return [
            *measured(f"{framework}: step", training, rounds, EVERY),
            *measured(f"{framework}: update", {**old["update"], WITH: now("update")}, rounds, 5 * EVERY),
            *measured(f"{framework}: look", {"a look": now("look")}, rounds, EVERY),
        ]


def shares(timings: list[Timing]) -> dict[str, dict[str, float]]:
    """Return shares of a training step: the counters' addition to an update, and a check every 100 steps; medians."""
    median = {(one.question, one.variant): statistics.median(one.microseconds) for one in timings}
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(one.question.partition(":")[0] for one in timings):
        step, update = median[f"{name}: step", WITH], median[f"{name}: update", WITH]
        before = median.get((f"{name}: update", BEFORE), update)
        look = median[f"{name}: look", "a look"]
        found[name] = {"counters": round((update - before) / step, 5), "looks": round(look / EVERY / step, 5)}
    return found


PARTS: dict[str, Callable[[str, Path | None, int], list[Timing]]] = {"health": health}


@app.command()
def run(
    part: Annotated[Literal["health"], typer.Option(help="What to measure.")] = "health",
    framework: Annotated[list[str] | None, typer.Option(help="A framework; may be repeated.")] = None,
    against: Annotated[Path | None, typer.Option(help="A checkout of an earlier polyamp.")] = None,
    rounds: Annotated[int, typer.Option(help="Rounds of measurements.")] = 15,
) -> None:
    """Measure, print a table, and write it to results/."""
    known = ("polyamp", "torch", "jax", "tensorflow-cpu", "tensorflow", "keras")
    versions = {entry.name: entry.version for entry in metadata.distributions() if entry.name in known}
    timings: list[Timing] = []
    for name in framework or STEPS:
        timings += PARTS[part](name, against, rounds)
        keep_timings(f"monitoring_{part}", timings, versions)
    publish(f"monitoring_{part}", timings, versions)
    of_a_step = shares(timings)
    keep(f"monitoring_{part}", versions, {"timings": [one.summary() for one in timings], "shares_of_a_step": of_a_step})
    for name, found in of_a_step.items():
        console().print(f"{name}: of a step, " + ", ".join(f"{what} {part:.2%}" for what, part in found.items()))


if __name__ == "__main__":
    app()
