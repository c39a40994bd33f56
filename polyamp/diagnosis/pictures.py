"""The picture of a probe, drawn into an image file.

It takes the numbers to draw, so the report can import this module. matplotlib is needed only when it draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from polyamp.diagnosis.recording import ACTIVATION, GRADIENT, PARAMETER, Observation, Recording
from polyamp.diagnosis.spread import LOWEST, Spread, Window
from polyamp.errors import InvalidValueError, missing
from polyamp.formats import Format
from polyamp.report import power

if TYPE_CHECKING:
    from os import PathLike

FAINTEST = 1e-4
"""Share of a tensor's elements that has the palest colour of the heat map."""

_LABELLED = 96  # rows, in all panels together, that have room for names
_TITLES = {
    ACTIVATION: "activations",
    GRADIENT: "gradients of activations",
    PARAMETER: "gradients of parameters",
}
_LOST, _LIMIT = "#d9d9d9", "#c0392b"


def draw_probe(
    path: str | PathLike[str], recording: Recording, limits: Format, window: Window | None, scale: float
) -> None:
    """Draw a heat map of every tensor over powers of two, with the format's limits, into an image file."""
    # Each row is a tensor, in the order of computation; darker cells hold more of its elements. Grey names are tensors
    # that the policy keeps in float32. The lines are the format's smallest subnormal, smallest normal and largest
    # number. In the panels of gradients, values that are lost or too large at the recommended loss scale are grey.
    panels = {kind: rows for kind in _TITLES if (rows := list(recording.of_kind(kind)))}
    heights = [max(len(rows), 3) for rows in panels.values()] or [3]
    figure = figure_for(path, (10, min(max(1.8 + 0.2 * sum(heights), 3.5), 16)))
    axes = list(figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0])
    low, high = _range(recording, limits, scale)
    for axis, (kind, rows) in zip(axes, panels.items(), strict=False):
        _heat(axis, rows, low, high)
        _name_rows(axis, rows, every=math.ceil(sum(heights) / _LABELLED))
        axis.set_title(f"{_TITLES[kind]} ({len(rows)})", loc="left", fontsize=9, pad=14)
        _limit_lines(axis, limits)
        if kind != ACTIVATION and window is not None:
            _shade_losses(axis, limits, scale, low, high)
    if panels:
        bar = figure.colorbar(axes[0].collections[0], ax=axes, pad=0.01, aspect=30, shrink=0.6)
        bar.set_label("share of the tensor's elements")
    axes[-1].set_xlabel("log2 of the magnitude")
    figure.suptitle(_title(recording, limits, window, scale), fontsize=11)
    figure.savefig(path, dpi=150)


def figure_for(path: str | PathLike[str], size: tuple[float, float]) -> Any:
    """Return an empty figure of matplotlib, for an image file."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise missing("matplotlib", extra="plot") from error
    figure = Figure(figsize=size, layout="constrained")
    known = figure.canvas.get_supported_filetypes()
    if PurePath(path).suffix.lstrip(".").lower() not in known:
        raise InvalidValueError(
            "no image format has this ending",
            where="plot(path)",
            found=repr(str(path)),
            allowed=", ".join(f".{ending}" for ending in sorted(known)),
            fix="name the file, for example, probe.png",
        )
    return figure


def _range(recording: Recording, limits: Format, scale: float) -> tuple[int, int]:
    """Return the exponents to show: the limits, also divided by the scale, and the elements' exponents near them."""
    seen = [place + LOWEST for one in recording.observations for place, n in enumerate(one.spread.counts) if n]
    below, above = round(math.log2(limits.smallest_subnormal)), math.ceil(math.log2(limits.max))
    if above - below > 100:  # a format of float32's range: its limits are far from anything
        return min(seen, default=-20) - 1, max(seen, default=0) + 2
    lost = below - 1 - max(0, round(math.log2(scale)))
    return max(min([*seen, lost]), below - 32) - 2, min(max([*seen, above]), above + 16) + 2


def _heat(axis: Any, rows: Sequence[Observation], low: int, high: int) -> None:
    from matplotlib.colors import LogNorm

    shares = [_shares(one.spread, low, high) for one in rows]
    colours = LogNorm(FAINTEST, 1.0, clip=True)
    axis.pcolormesh(range(low, high + 1), range(len(rows) + 1), shares, cmap="Blues", norm=colours, zorder=2)
    axis.set_xlim(low, high)
    axis.set_ylim(len(rows), 0)


def _name_rows(axis: Any, rows: Sequence[Observation], every: int) -> None:
    labelled = range(0, len(rows), every)
    axis.set_yticks([row + 0.5 for row in labelled], [_name(rows[row]) for row in labelled], fontsize=6.5)
    for label, row in zip(axis.get_yticklabels(), labelled, strict=True):
        label.set_color("black" if rows[row].is_low else "grey")
    axis.tick_params(axis="y", length=0)


def _shares(spread: Spread, low: int, high: int) -> list[float]:
    """Return the share of a tensor's elements with each exponent; NaN, which is not drawn, for none."""
    shares = [0.0] * (high - low)
    for place, count in enumerate(spread.counts):
        shares[min(max(place + LOWEST - low, 0), len(shares) - 1)] += count / max(spread.seen, 1)
    return [share or math.nan for share in shares]


def _name(one: Observation, longest: int = 44) -> str:
    return one.place if len(one.place) <= longest else f"…{one.place[1 - longest :]}"


def _limit_lines(axis: Any, limits: Format) -> None:
    left, right = axis.get_xlim()
    named = ((limits.smallest_subnormal, "subnormal", ":"), (limits.smallest_normal, "normal", "--"))
    for value, name, line in (*named, (limits.max, "largest", "-")):
        place = math.log2(value)
        if left < place < right:
            axis.axvline(place, color=_LIMIT, lw=1.2, ls=line, zorder=3)
            _above(axis, place, name, _LIMIT)


def _shade_losses(axis: Any, limits: Format, scale: float, low: int, high: int) -> None:
    """Shade where a gradient is lost or overflows although the scale multiplies it."""
    shift = math.log2(scale)
    lost, overflow = math.log2(limits.smallest_subnormal) - 1 - shift, math.log2(limits.max) - shift
    for start, end, name in ((low, lost, "lost, scaled"), (overflow, high, "too large, scaled")):
        if low <= start < end <= high:
            axis.axvspan(start, end, color=_LOST, lw=0, zorder=1)
            _above(axis, (start + end) / 2, name, "grey")


def _above(axis: Any, place: float, text: str, colour: str) -> None:
    """Write a word above the panel."""
    axis.text(place, 0, text, color=colour, fontsize=6.5, va="bottom", ha="center")


def _title(recording: Recording, limits: Format, window: Window | None, scale: float) -> str:
    safe = "no loss scale is needed" if window is None else f"safe loss scales {window}"
    if window is not None and window.is_empty:
        safe = "no loss scale suits all gradients"
    start = f"; grey: lost or too large at {power(scale)}" if window is not None else ""
    policy = recording.policy.partition(" ")[0]
    return f"{recording.framework}, {policy}: limits of {limits.name}; {safe}{start}"
