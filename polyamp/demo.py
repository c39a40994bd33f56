"""``polyamp demo``: the digits example of every installed framework, in float32 and in mixed precision."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from polyamp import adapters
from polyamp.adapters import AnyAdapter
from polyamp.doctor import why_broken
from polyamp.errors import missing
from polyamp.policies import policy
from polyamp.report import figure_for, power, save_figure
from polyamp.scale import StepResult
from polyamp.settings import LossScale

# The scale grows every 40 steps instead of 2 000, so that a short run shows growth, an overflow and a skipped step.
POLICIES = {
    "float32": policy("float32"),
    "mixed_bfloat16": policy("mixed_bfloat16"),
    "mixed_float16": policy("mixed_float16", loss_scale=LossScale(interval=40)),
}


@dataclass(frozen=True)
class Run:
    """The numbers of one framework under one policy."""

    framework: str  # the adapter's title, such as ``keras on jax``
    policy: str
    largest_difference: float  # of a step's loss from the float32 loss of the same step
    skipped: int  # steps that were not applied
    losses: list[float]  # unscaled loss of each step
    scales: list[float]  # loss scale after each step
    applied: list[bool]  # whether each step was applied
    accuracy: float  # share of test images classified correctly, 0 to 1
    parameter_bytes: int  # of the parameters as stored
    activation_bytes: int  # of the layers' outputs for one training batch
    seconds: float  # training time without the first step
    first_step_seconds: float  # until the first step was done: it loads the data, traces and compiles


def examples(names: Iterable[str] | None = None) -> tuple[dict[AnyAdapter, Any], list[str]]:
    """Return each installed adapter's example, and an install hint for each framework that is not installed."""
    found: dict[AnyAdapter, Any] = {}
    absent = []
    for name in adapters.names() if names is None else names:
        adapters.entry_named(name)  # an unknown name is not an absent framework
        try:
            adapter = adapters.adapter_named(name)
            found[adapter] = import_module(f"polyamp.examples.{name}_digits")
        except ModuleNotFoundError as error:
            package = str(error.name).partition(".")[0]
            if package == "sklearn":
                raise missing("scikit-learn", extra="demo") from error
            if package != "polyamp":  # an adapter from elsewhere has no example
                absent.append(why_broken(name, error))
        except Exception as error:
            absent.append(why_broken(name, error))
    return found, absent


def runs(
    chosen: Mapping[AnyAdapter, Any], steps: int, announce: Callable[[str], None], on_step: Callable[[], None]
) -> Iterator[Run]:
    """Train under every policy in every framework, float32 first. Yield each run when it ends."""
    for adapter, example in chosen.items():
        title = adapter.describe().get("title", adapter.name)
        exact: list[float] = []
        for name in POLICIES:
            announce(f"{title} {name}")
            run = _run(example, title, name, steps, exact, on_step)
            exact = exact or run.losses
            yield run


def _run(example: Any, title: str, name: str, steps: int, exact: list[float], on_step: Callable[[], None]) -> Run:
    losses: list[float] = []
    scales: list[float] = []
    applied: list[bool] = []
    times = [time.perf_counter()]

    def report(loss: float, step: StepResult) -> None:
        losses.append(loss)
        scales.append(float(step.scale))
        applied.append(bool(step.applied))
        times.append(time.perf_counter())
        on_step()

    found = example.train(POLICIES[name], steps, report)
    return Run(
        framework=title,
        policy=name,
        largest_difference=max(abs(loss - other) for loss, other in zip(losses, exact or losses, strict=True)),
        skipped=applied.count(False),
        losses=losses,
        scales=scales,
        applied=applied,
        seconds=times[-1] - times[1],
        first_step_seconds=times[1] - times[0],
        **found,
    )


def table(done: Iterable[Run]) -> Table:
    """Return the runs as a table, one row each."""
    caption = "The same weights and batches in every row. difference: the largest, of one step's loss, from float32."
    shown = Table(title="Handwritten digits", caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("framework", "policy"):
        shown.add_column(heading, no_wrap=True)
    for heading in ("accuracy", "loss", "difference", "scale", "skipped", "params", "activations", "time"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for run in done:
        scale = run.scales[-1]
        shown.add_row(
            run.framework,
            run.policy,
            f"{run.accuracy:.2%}",
            f"{run.losses[-1]:.4f}",
            f"{run.largest_difference:.4f}",
            "1" if scale == 1 else power(scale),
            f"{run.skipped}",
            f"{run.parameter_bytes / 1024:.1f} KiB",
            f"{run.activation_bytes / 1024:.1f} KiB",
            f"{run.first_step_seconds + run.seconds:.1f} s",
        )
    return shown


def report(adapters: Iterable[AnyAdapter], done: list[Run]) -> dict[str, Any]:
    """Return all runs as JSON values, with the machine and the frameworks they ran on."""
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
    }
    frameworks = {adapter.name: adapter.describe() for adapter in adapters}
    return {"machine": machine, "frameworks": frameworks, "runs": [asdict(run) for run in done]}


def plot(done: list[Run], path: str) -> None:
    """Draw loss and loss scale over the steps into an image file, one column per framework."""
    frameworks = list(dict.fromkeys(run.framework for run in done))
    figure = figure_for(path, (4.5 * len(frameworks), 6))
    axes = figure.subplots(2, len(frameworks), sharex=True, sharey="row", squeeze=False)
    for run in done:
        above, below = axes[:, frameworks.index(run.framework)]
        above.plot(run.losses, label=run.policy, linewidth=0.9)
        below.step(range(len(run.scales)), run.scales, label=run.policy, where="post")
    for column, framework in enumerate(frameworks):
        axes[0, column].set(title=framework, yscale="log")
        axes[1, column].set(xlabel="step")
        axes[1, column].set_yscale("log", base=2)
    axes[0, 0].set_ylabel("training loss (nats)")
    axes[1, 0].set_ylabel("loss scale")
    axes[0, 0].legend(frameon=False)
    save_figure(figure, path)
