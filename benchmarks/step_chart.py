"""Draw README's picture of whole training steps from results/end_to_end_cuda.json, for light and for dark pages.

    python benchmarks/step_chart.py [folder]    # docs/images

Text stays text in the SVG files, in the reader's own font.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib import rc_context
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
RESULTS = ROOT / "benchmarks" / "results" / "end_to_end_cuda.json"
PANELS = {
    ("resnet50", "eager"): "ResNet-50, 256 images",
    ("bert-large-128", "eager"): "BERT-large, 256 texts",
    ("bert-large-128", "compiled"): "BERT-large, compiled",
    ("gpt2", "eager"): "GPT-2, 12 texts",
}  # ResNet-50 and GPT-2 have a panel of compiled steps once polyamp's is measured
BARS = {
    "float32": "float32",
    "TF32": "TF32",
    "native bfloat16": "torch.autocast, bfloat16",
    "polyamp bfloat16": "polyamp, bfloat16",
}
COLOURS = {"float32": "#b9bec6", "TF32": "#8b949e", "native bfloat16": "#d29a4a", "polyamp bfloat16": "#2f81f7"}
INK = {"light": "#1f2328", "dark": "#e6edf3"}


def draw(results: dict[str, Any], ink: str) -> Figure:
    """Return a panel for each model, in which each way to compute has a bar: the milliseconds of a step."""
    times = {(row["model"], row["way"], row["variant"]): row["ms"] for row in results["rows"]}
    figure = Figure(figsize=(9.6, 2.3), layout="constrained")
    for axis, (panel, title) in zip(figure.subplots(1, len(PANELS), sharey=True), PANELS.items(), strict=True):
        axis.set_title(title, fontsize=10, color=ink)
        for place, variant in enumerate(BARS):
            ms = times.get((*panel, variant))
            axis.barh(place, ms or 0, color=COLOURS[variant], height=0.7)
            axis.text(ms or 0, place, f" {ms:.0f}" if ms else "not measured", va="center", fontsize=9, color=ink)
        axis.set_yticks(range(len(BARS)), BARS.values(), fontsize=9, color=ink)
        axis.set_xlim(0, 1.2 * max(times[*panel, variant] for variant in BARS if (*panel, variant) in times))
        axis.tick_params(length=0)
        axis.set_xticks([])
        axis.spines[:].set_visible(False)
    axis.invert_yaxis()
    machine, versions = results["machine"], results["versions"]
    figure.supxlabel(
        f"milliseconds a training step, forward, backward and update: {machine['gpu']}, PyTorch {versions['torch']}",
        fontsize=9,
        color=ink,
    )
    return figure


def main(folder: Annotated[Path, typer.Argument()] = IMAGES) -> None:
    """Draw ``steps_light.svg`` and ``steps_dark.svg``."""
    results = json.loads(RESULTS.read_text())
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "steps", "font.family": "sans-serif"}):
        for page, ink in INK.items():
            figure = draw(results, ink)
            figure.savefig(folder / f"steps_{page}.svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    typer.run(main)
