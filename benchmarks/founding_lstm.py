"""The figure of the big LSTM: the training loss in float32, and in float16 with scale 1, scale 128, and dynamic."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from founding_accuracy import module_of
from founding_results import FRAMEWORKS, LSTM, add, rows, versions
from keeping import Row

import polyamp
from polyamp import LossScale
from polyamp.report import finite

MODEL = "big_lstm"
CURVES = {
    "float32": polyamp.policy("float32"),
    "float16, scale 1": polyamp.policy("mixed_float16", loss_scale=LossScale.fixed(1)),
    "float16, scale 128": polyamp.policy("mixed_float16", loss_scale=LossScale.fixed(128)),
    "float16, dynamic": polyamp.policy("mixed_float16"),
}
STYLES = {
    "float32": {"color": "black", "linewidth": 3.2, "alpha": 0.35},
    "float16, scale 1": {"color": "#c0392b"},
    "float16, scale 128": {"color": "#1f5fa8"},
    "float16, dynamic": {"color": "#2e7d5b", "linestyle": "--"},
}
STEPS = 20
"""Steps of a curve: more than the accuracy table trains, so that the stall is seen."""
LAST = 3
"""Steps whose mean loss stands for the end of a curve."""


def measure(framework: str, name: str, seed: int, steps: int = STEPS) -> Row:
    """Train one curve, and keep every loss of it."""
    curve, start = import_module(module_of(framework, MODEL)).curve, time.perf_counter()
    losses = [finite(float(loss)) for loss in curve(CURVES[name], seed, steps)]
    seconds = round(time.perf_counter() - start, 2)
    row = {"name": name, "framework": framework, "policy": str(CURVES[name]), "seed": seed, "steps": len(losses)}
    return add(LSTM.format(framework), row | {"seconds": seconds, "versions": versions(framework), "losses": losses})


def measured(framework: str) -> dict[str, Row]:
    """Return the kept curves of a framework, in the order of the figure."""
    found = {row["name"]: row for row in rows(LSTM.format(framework))}
    return {name: found[name] for name in CURVES if name in found}


def last_loss(row: Row) -> float | None:
    """Return the mean loss of the last steps; None if one of them was not finite."""
    last = row["losses"][-LAST:]
    return None if None in last else sum(last) / len(last)


def draw(file: Path) -> None:
    """Draw a panel for each framework that has curves."""
    from matplotlib.figure import Figure

    panels = list(_panels())
    figure = Figure(figsize=(4.2 * max(1, len(panels)), 3.8), layout="constrained")
    axes: Any = figure.subplots(1, max(1, len(panels)), sharey=True, squeeze=False)[0]
    for axis, (framework, found) in zip(axes, panels, strict=False):
        for name, row in found.items():
            losses = [float("nan") if loss is None else loss for loss in row["losses"]]
            axis.plot(range(1, len(losses) + 1), losses, label=name, **STYLES[name])
        axis.set(title=FRAMEWORKS[framework], xlabel="step")
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel("training loss, nats a word")
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=len(CURVES), frameon=False)
    figure.savefig(file, dpi=110)


def _panels() -> Iterator[tuple[str, dict[str, Row]]]:
    return ((framework, found) for framework in FRAMEWORKS if (found := measured(framework)))
