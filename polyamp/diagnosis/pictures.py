"""The pictures of a probe and of a profile, drawn into image files.

This file imports no report, so that reports can import it; matplotlib is imported only to draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from polyamp.diagnosis.recording import ACTIVATION, Recording
from polyamp.diagnosis.spread import LOWEST, Spread
from polyamp.formats import Format
from polyamp.report import figure_for, save_figure, share

if TYPE_CHECKING:
    from os import PathLike
FAINTEST = 1e-4
"""Share of a tensor's elements that has the palest colour of the heat map."""

_LABELLED = 96  # rows that have room for names
_PLACES = 20  # rows of a profile
_LONGEST = 44  # characters of a name


def draw_probe(path: str | PathLike[str], title: str, recording: Recording, limits: Format, scale: float) -> None:
    """Draw a heat map of every tensor over powers of two, with the format's limits, into an image file."""
    # Each row is a tensor, in the order of computation; darker cells hold more of its elements. Grey names are tensors
    # that the policy keeps in float32. The lines are the format's smallest subnormal, smallest normal and largest
    # number; for gradients, which ``scale`` multiplies, they are where these limits lie for unscaled values.
    rows = recording.observations
    figure = figure_for(path, (10, min(max(1.8 + 0.2 * len(rows), 3.5), 16)))
    axis = figure.subplots()
    low, high = _range(recording, limits, scale)
    if rows:
        from matplotlib.colors import LogNorm

        shares = [_shares(one.spread, low, high) for one in rows]
        mesh = axis.pcolormesh(
            range(low, high + 1), range(len(rows) + 1), shares, cmap="Blues", norm=LogNorm(FAINTEST, 1.0, clip=True)
        )
        figure.colorbar(mesh, pad=0.01, aspect=30, shrink=0.6, label="share of the tensor's elements")
    forward = len(list(recording.of_kind(ACTIVATION)))
    for start, end, factor in ((0, forward, 1.0), (forward, len(rows), scale)):
        for value, style in ((limits.smallest_subnormal, ":"), (limits.smallest_normal, "--"), (limits.max, "-")):
            axis.vlines(math.log2(value / factor), start, end, color="#c0392b", lw=1.2, ls=style)
    labelled = range(0, len(rows), math.ceil(len(rows) / _LABELLED) or 1)
    axis.set_yticks([row + 0.5 for row in labelled], [_short(rows[row].place) for row in labelled], fontsize=6.5)
    for label, row in zip(axis.get_yticklabels(), labelled, strict=True):
        label.set_color("black" if rows[row].is_low else "grey")
    axis.set(xlim=(low, high), ylim=(max(len(rows), 1), 0), xlabel="log2 of the magnitude")
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)


def _range(recording: Recording, limits: Format, scale: float) -> tuple[int, int]:
    """Return the exponents to show: the limits, also divided by the scale, and the elements' exponents near them."""
    seen = [place + LOWEST for one in recording.observations for place, n in enumerate(one.spread.counts) if n]
    below, above = round(math.log2(limits.smallest_subnormal)), math.ceil(math.log2(limits.max))
    if above - below > 100:  # a format of float32's range: its limits are far from anything
        return min(seen, default=-20) - 1, max(seen, default=0) + 2
    lost = below - 1 - max(0, round(math.log2(scale)))
    return max(min([*seen, lost]), below - 32) - 2, min(max([*seen, above]), above + 16) + 2


def _shares(spread: Spread, low: int, high: int) -> list[float]:
    """Return the share of a tensor's elements with each exponent; NaN, which is not drawn, for none."""
    shares = [0.0] * (high - low)
    for place, count in enumerate(spread.counts):
        shares[min(max(place + LOWEST - low, 0), len(shares) - 1)] += count / max(spread.seen, 1)
    return [share or math.nan for share in shares]


_COLOURS = {
    "16-bit products": "#1f77b4",
    "other compute": "#17becf",
    "casts": "#d62728",
    "memory-bound": "#ff7f0e",
    "optimizer": "#9467bd",
    "host": "#7f7f7f",
}


class Bar(NamedTuple):
    """A part of a step."""

    name: str
    kind: str  # of work, which decides its colour
    share: float


def draw_profile(path: str | PathLike[str], title: str, kinds: Sequence[Bar], places: Sequence[Bar]) -> None:
    """Draw the share of a step that each kind of work takes, and below it that of each place, into an image file."""
    places = places[:_PLACES]
    figure = figure_for(path, (10, 2.2 + 0.25 * len(places)))
    axis = figure.subplots()
    start = 0.0
    for one in kinds:
        axis.barh(0, one.share, left=start, color=_COLOURS[one.kind], label=f"{share(one.share)} {one.name}")
        start += one.share
    rows, colours = range(1, len(places) + 1), [_COLOURS[one.kind] for one in places]
    axis.barh(rows, [one.share for one in places], color=colours)
    axis.set_yticks([0, *rows], ["the step", *(_short(one.name) for one in places)], fontsize=7)
    axis.set(xlim=(0, 1), ylim=(len(places) + 0.5, -0.5), xlabel="share of the step")
    axis.legend(fontsize=8)
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else f"…{name[1 - _LONGEST :]}"
