"""Draw differences between runs over and over, and count how often `polyamp.parity` is wrong.

    python benchmarks/parity_errors.py [--draws 4000] [--seeds 10]

Nothing is trained. Each draw is one parity with ten seeds: differences from float32 in units of the margin, from a
distribution with a known mean. The hardest mean is the margin itself, where neither "equivalent" nor "worse" is true.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import scipy
import typer
from interleave import console
from keeping import keep
from rich.box import SIMPLE_HEAD
from rich.progress import track
from rich.table import Table

import polyamp
from polyamp.diagnosis.comparison import Comparison, Question, Run

Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]
NOISE: dict[str, Draw] = {  # mean 0, deviation 1
    "normal": lambda random, shape: random.normal(size=shape),
    "heavy tails (t, 3 degrees)": lambda random, shape: random.standard_t(3, size=shape) / 3**0.5,
    "uniform": lambda random, shape: random.uniform(-(3**0.5), 3**0.5, size=shape),
    "rounded to the deviation": lambda random, shape: np.round(random.normal(size=shape)) / 1.04,
    "skewed to worse": lambda random, shape: random.exponential(size=shape) - 1,
    "skewed to better": lambda random, shape: 1 - random.exponential(size=shape),
}
MEANS = {"none": 0.0, "the margin": 1.0, "twice the margin": 2.0}
DEVIATIONS = (0.3, 1.0)
VERDICTS = ("equivalent", "worse", "better", "not yet known")


def ended(differences: np.ndarray, question: Question) -> tuple[str, int]:
    """Return the verdict and the number of seeds of one parity, with the looks of `polyamp.parity`."""
    low = [Run(seed, {"loss": float(one)}) for seed, one in enumerate(differences)]
    float32 = [Run(seed, {"loss": 0.0}) for seed in range(len(low))]
    for seen in range(3, len(low) + 1):
        found = Comparison("mixed_float16", tuple(low[:seen]), tuple(float32[:seen]), question)
        if found.verdict != "not yet known":
            break
    return found.verdict, found.seeds


def rates(noise: str, deviation: float, mean: float, question: Question, draws: int) -> dict[str, Any]:
    """Return the share of each verdict, and the mean number of seeds."""
    made = mean + deviation * NOISE[noise](np.random.default_rng(0), (draws, question.seeds))
    verdicts, seeds = zip(*(ended(row, question) for row in made), strict=True)
    found = Counter(verdicts)
    return {verdict: round(found[verdict] / draws, 4) for verdict in VERDICTS} | {"seeds": round(np.mean(seeds), 1)}


def main(
    draws: Annotated[int, typer.Option(min=100, help="Parities for each row.")] = 4000,
    seeds: Annotated[int, typer.Option(min=3, help="Seeds of each parity.")] = 10,
    alpha: Annotated[float, typer.Option(help="The stated error rate.")] = 0.05,
) -> None:
    """Print the rates, and keep them in results/parity_errors.json."""
    cases = [(noise, deviation, mean) for noise in NOISE for deviation in DEVIATIONS for mean in MEANS]
    rows = []
    for noise, deviation, mean in track(cases, "drawing", console=console()):
        found = rates(noise, deviation, MEANS[mean], Question(1.0, metric="loss", seeds=seeds, alpha=alpha), draws)
        rows.append({"differences": noise, "deviation": deviation, "true difference": mean, **found})
    table = Table(*rows[0], box=SIMPLE_HEAD, title=f"{draws} parities of {seeds} seeds; stated error rate {alpha:.0%}")
    for row in rows:
        table.add_row(*(f"{part:.1%}" if name in VERDICTS else str(part) for name, part in row.items()))
    console().print(table)
    versions = {"polyamp": polyamp.__version__, "numpy": np.__version__, "scipy": scipy.__version__}
    keep("parity_errors", versions, {"draws": draws, "seeds": seeds, "alpha": alpha, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
