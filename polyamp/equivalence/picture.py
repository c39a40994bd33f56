"""The picture of a `Parity`: every seed's difference from float32, the interval of the mean, and the margin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from polyamp.diagnosis.pictures import figure_for
from polyamp.equivalence.comparison import Comparison
from polyamp.report import finite, plural

if TYPE_CHECKING:
    from os import PathLike

COLOURS = {"equivalent": "#2e7d5b", "worse": "#c0392b", "better": "#1f5fa8", "not yet known": "grey"}


def draw(path: str | PathLike[str], name: str, ways: Sequence[Comparison]) -> None:
    """Draw a row for each comparison into an image file; see `Parity.plot`."""
    figure = figure_for(path, (9, 1.6 + 0.55 * len(ways)))
    axis = figure.subplots()
    limit = finite(ways[0].limit) or 0.0  # not known if it is a share and float32 diverged
    axis.axvspan(-limit, limit, color=COLOURS["equivalent"], alpha=0.12, lw=0, label="margin")
    axis.axvline(0, color="black", lw=0.8)
    shown = [way.difference for way in ways if not way.control and way.difference is not None]
    reach = max([2 * limit, *(1.3 * max(abs(one.low), abs(one.high)) for one in shown)])
    if reach:
        axis.set_xlim(-reach, reach)  # a control that fails may lie far outside
    for place, way in enumerate(ways):
        _draw_way(axis, place, way)
    axis.set_yticks(range(len(ways)), [_label(way) for way in ways])
    axis.set_ylim(len(ways) - 0.5, -0.5)
    axis.set(xlabel=f"{ways[0].metric}: difference from float32", title=name)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9, loc="lower right")
    figure.savefig(path, dpi=150)


def _draw_way(axis: Any, place: int, way: Comparison) -> None:
    colour, found = COLOURS[way.verdict], way.difference
    if way.is_paired:
        pairs = zip(way.runs, way.reference, strict=True)
        seeds = [run.value - other.value for run, other in pairs if math.isfinite(run.value - other.value)]
        axis.plot(seeds, [place] * len(seeds), "|", color=colour, alpha=0.6, ms=10)
    if found is not None:
        axis.errorbar(found.mean, place, xerr=found.reach, fmt="o", color=colour, capsize=4)
        left, right = axis.get_xlim()
        if found.low > right or found.high < left:
            edge, side = (right, "right") if found.mean > 0 else (left, "left")
            axis.annotate("outside", (edge, place), color=colour, ha=side, va="center")


def _label(way: Comparison) -> str:
    return f"{'control: ' if way.control else ''}{way.name}\n{way.verdict}, {plural(way.seeds, 'seed')}"
