"""Compare runs of each policy with runs in float32: the verdict, the table and the picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import sub
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from polyamp.diagnosis.equivalence import FEWEST_TO_AGREE, Difference, alpha_at, paired, seeds_to_tell
from polyamp.errors import refuses_unreadable
from polyamp.report import Report, figure_for, finite, plural, save_figure

if TYPE_CHECKING:
    from os import PathLike


Better = Literal["higher", "lower"]
Verdict = Literal["equivalent", "worse", "better", "not yet known"]

ASSUMPTIONS = (
    "the seeds are independent draws of what training varies; nothing is shown for other data or settings",
    "mean differences follow a t distribution: runs in 16 bits that fail only once in a while are not excluded",
    "every policy is judged by itself: of 20 verdicts at the edge of the margin one is wrong, at 5 %",
)
COLOURS = {"equivalent": "#2e7d5b", "worse": "#c0392b", "better": "#1f5fa8", "not yet known": "grey"}


class Run(NamedTuple):
    """One finished training."""

    seed: int
    metrics: Mapping[str, float]  # all that ``train`` returned, by name
    skipped: int | None = None  # number of skipped steps; None if ``train`` did not return its optimizer
    failure: str = ""  # text of the error that ended it: the loss scale gave up, or a loss was not finite

    def value(self, metric: str) -> float:
        """Return a metric; inf or NaN if training diverged."""
        return self.metrics.get(metric, math.nan)


@dataclass(frozen=True)
class Question:
    """The metric, margin, seeds and error rate of the comparisons; the same for every policy of a call."""

    margin: float  # in the metric's unit, or the share of float32's mean
    is_share: bool = False
    metric: str = ""  # empty until the first run has named its metrics
    better: Better = "lower"
    seeds: int = 10  # the seeds that are trained if no earlier look decides
    alpha: float = 0.05  # chance of a wrong verdict, for each comparison
    stop_early: bool = True

    def mean(self, runs: Sequence[Run]) -> float:
        """Return the mean of the metric; NaN of no run, inf or NaN if a run diverged."""
        return math.fsum(run.value(self.metric) for run in runs) / len(runs) if runs else math.nan

    def diverged(self, runs: Sequence[Run]) -> str:
        """Return which runs ended without a finite metric; empty if none did."""
        lost = [run for run in runs if not math.isfinite(run.value(self.metric))]
        if not lost:
            return ""
        which = f"{len(lost)} of {plural(len(runs), 'run')} (seed {', '.join(str(run.seed) for run in lost)})"
        return f"without a finite {self.metric}: {which}{f': {lost[0].failure}' if lost[0].failure else ''}"

    def as_json(self, runs: Sequence[Run]) -> list[dict[str, Any]]:
        """Return runs as JSON values; a metric that is not finite becomes None."""
        return [
            {
                **run._asdict(),
                "value": finite(run.value(self.metric)),
                "metrics": {name: finite(value) for name, value in run.metrics.items()},
            }
            for run in runs
        ]


@dataclass(frozen=True)
class Comparison:
    """Runs of one policy, or of one negative control of it, next to runs in float32."""

    policy: str  # the policy's text
    runs: tuple[Run, ...]  # in order of the seeds
    reference: tuple[Run, ...]  # the runs in float32
    question: Question
    control: str = ""  # name of the negative control; empty for the policy itself

    @property
    def name(self) -> str:
        """The policy's text, cut if long; for a negative control, its name."""
        return self.control or (self.policy if len(self.policy) <= 60 else f"{self.policy[:59]}…")

    @property
    def seeds(self) -> int:
        """The number of seeds that were trained."""
        return len(self.runs)

    @property
    def mean(self) -> float:
        """The mean of the metric, inf or NaN if a run diverged."""
        return self.question.mean(self.runs)

    @property
    def limit(self) -> float:
        """The margin in the metric's unit."""
        asked = self.question
        return asked.margin * abs(asked.mean(self.reference)) if asked.is_share else asked.margin

    @property
    def differences(self) -> list[float]:
        """The finite differences from float32, one for each seed."""
        values = ([run.value(self.question.metric) for run in runs] for runs in (self.runs, self.reference))
        return list(filter(math.isfinite, map(sub, *values)))

    @cached_property
    def difference(self) -> Difference | None:
        """The mean difference from float32 with its interval; None with fewer than two seeds or after divergence."""
        if self.seeds < 2 or len(self.differences) < self.seeds:
            return None
        return paired(self.differences, alpha=self._alpha or self.question.alpha)

    @property
    def verdict(self) -> Verdict:
        """Whether the means are equivalent, or which one is worse by more than the margin."""
        return self._decision[0]

    @property
    def reason(self) -> str:
        """The verdict's reason if the numbers do not show it; else empty."""
        return self._decision[1]

    @property
    def more_seeds(self) -> int | None:
        """The number of seeds that would decide four times in five; None if decided, or if no number would."""
        if self.verdict != "not yet known" or self.reason or self.difference is None:
            return None
        return seeds_to_tell(self.difference, self.limit, self.seeds)

    @property
    def _alpha(self) -> float | None:
        asked = self.question
        return alpha_at(self.seeds, asked.seeds, asked.alpha, asked.stop_early)

    @cached_property
    def _decision(self) -> tuple[Verdict, str]:
        asked, found, limit = self.question, self.difference, self.limit
        if diverged := asked.diverged(self.reference):
            return "not yet known", f"float32 itself ended {diverged}"
        if diverged := asked.diverged(self.runs):
            return "worse", f"ended {diverged}"
        if limit == 0:
            return "not yet known", "the margin is a share of float32's mean, which is 0; state it as a number"
        is_last = self.seeds >= asked.seeds
        if found is None or self._alpha is None or (found.error == 0 and not is_last):  # rounded metrics may be equal
            return "not yet known", ""
        if found.beyond(limit):
            return ("better" if (found.mean > 0) == (asked.better == "higher") else "worse"), ""
        if not found.within(limit) or not (is_last or self.seeds >= FEWEST_TO_AGREE):
            return "not yet known", ""
        return self._equivalent(found)

    def _equivalent(self, found: Difference) -> tuple[Verdict, str]:
        if found.error == 0 and all(run.metrics == self.reference[0].metrics for run in self.reference):
            reason = "float32 gave one and the same value for every seed: does train use its seed? If it does, a metric"
            return "not yet known", f"{reason} such as the loss shows more"
        same = [run.metrics for run in self.runs] == [run.metrics for run in self.reference]
        return "equivalent", "every seed has the value of float32, as if the policy were not in effect" if same else ""

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON values; numbers that are not finite become None."""
        found = self.difference
        return {
            "policy": self.policy,
            "control": self.control or None,
            "verdict": self.verdict,
            "reason": self.reason or None,
            "seeds": self.seeds,
            "mean": finite(self.mean),
            "difference": found and found.mean,
            "interval": found and [found.low, found.high],
            "coverage": found and 1 - 2 * found.alpha,
            "margin": finite(self.limit),
            "p_equivalent": found and found.p_equivalent(self.limit),
            "more_seeds": self.more_seeds,
            "runs": self.question.as_json(self.runs),
        }


@dataclass(frozen=True)
class Parity(Report):
    """The result of `polyamp.parity`. Prints as a table with its conclusions.

    Attributes:
        name: of the training function.
        question: what was compared, and the margin.
        float32: the runs in float32, in order of the seeds.
        ways: every comparison, those of negative controls included.
    """

    RIGHT = range(1, 7)

    name: str
    question: Question
    float32: tuple[Run, ...]
    ways: tuple[Comparison, ...]

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """The policies' comparisons, in the order in which they were named."""
        return tuple(way for way in self.ways if not way.control)

    def controls_of(self, comparison: Comparison) -> tuple[Comparison, ...]:
        """Return the negative controls of a policy."""
        return tuple(way for way in self.ways if way.control and way.policy == comparison.policy)

    def can_tell(self, comparison: Comparison) -> bool:
        """Return whether one of a policy's negative controls differs from float32, or there are none."""
        controls = self.controls_of(comparison)
        return not controls or any(way.verdict in ("worse", "better") for way in controls)

    @property
    def verdict(self) -> Verdict | Literal["cannot tell"]:
        """The verdict of all policies together: the most serious one.

        "cannot tell": the policies are equivalent to float32, but so are the negative controls of one of them.
        """
        found = {one.verdict for one in self.comparisons}
        if "worse" in found or "not yet known" in found:
            return "worse" if "worse" in found else "not yet known"
        if not all(map(self.can_tell, self.comparisons)):
            return "cannot tell"
        return "better" if found == {"better"} else "equivalent"

    def __bool__(self) -> bool:
        """Return whether every policy was shown to train as well as float32, on a task that could have failed."""
        return self.verdict in ("equivalent", "better")

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values, each run included."""
        asked = self.question
        return {
            "name": self.name,
            **vars(asked),
            "verdict": self.verdict,
            "float32": {"mean": finite(asked.mean(self.float32)), "runs": asked.as_json(self.float32)},
            "comparisons": [{**way.as_dict(), "can_tell": self.can_tell(way)} for way in self.comparisons],
            "controls": [way.as_dict() for way in self.ways if way.control],
            "assumptions": list(ASSUMPTIONS),
        }

    def heading(self) -> str:
        """Return what was compared, with which margin."""
        asked, limit = self.question, self.ways[0].limit
        share = f" ({asked.margin * 100:.3g}% of float32's mean)" if asked.is_share else ""
        compared = f"parity of {self.name} with float32: {asked.metric}, {asked.better} is better"
        rate = f"error rate {asked.alpha:.0%} for each verdict"
        return f"{compared}\nmargin {limit:.3g}{share}, compared in pairs, by seed; {rate}"

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table: the heading, then every policy with its negative controls below it.

        The column "float32" has the mean in float32 over the same seeds.
        """
        heading = ("policy", "seeds", "float32", "mean", "difference", "interval", "coverage", "verdict")
        return [heading, *map(_row, self.ways)]

    def sentences(self) -> list[str]:
        """Return a conclusion for each policy, and what is assumed."""
        return [*self._conclusions(), "", "assumed: " + ";\n         ".join(ASSUMPTIONS) + "."]

    def _conclusions(self) -> Iterator[str]:
        for one in self.comparisons:
            yield _conclusion(one)
            controls = self.controls_of(one)
            if not controls or one.verdict != "equivalent":
                continue
            listed = ", ".join(f"{way.name} ({way.verdict})" for way in controls)
            if self.can_tell(one):
                yield f"The task can tell: of its negative controls {listed}."
            else:
                yield f"This task cannot tell: no negative control of {one.name} failed: {listed}."
                yield "A smaller margin, a smaller learning rate or more steps may tell."

    @refuses_unreadable
    def plot(self, path: str | PathLike[str]) -> None:
        """Draw every seed's difference from float32, the mean with its interval, and the margin, into an image file.

        Raises:
            InvalidValueError: the file's ending does not name an image format.
            MissingFrameworkError: matplotlib is not installed.
        """
        figure = figure_for(path, (9, 1.6 + 0.55 * len(self.ways)))
        axis = figure.subplots()
        limit = finite(self.ways[0].limit) or 0.0  # not known if it is a share and float32 diverged
        axis.axvspan(-limit, limit, color=COLOURS["equivalent"], alpha=0.12, lw=0, label="margin")
        axis.axvline(0, color="black", lw=0.8)
        for place, way in enumerate(self.ways):
            colour, found = COLOURS[way.verdict], way.difference
            axis.plot(way.differences, [place] * len(way.differences), "|", color=colour, alpha=0.6, ms=10)
            if found is not None:
                axis.errorbar(found.mean, place, xerr=found.reach, fmt="o", color=colour, capsize=4)
        shown = [one.difference for one in self.comparisons if one.difference is not None]
        if reach := max([2 * limit, *(1.3 * max(abs(one.low), abs(one.high)) for one in shown)]):
            axis.set_xlim(-reach, reach)  # a control that fails may lie far outside
        labels = [f"{'control: ' if way.control else ''}{way.name}\n{way.verdict}" for way in self.ways]
        axis.set_yticks(range(len(labels)), labels)
        axis.set(xlabel=f"{self.question.metric}: difference from float32", title=self.name)
        axis.set_ylim(len(labels) - 0.5, -0.5)
        axis.legend(frameon=False, fontsize=9, loc="lower right")
        save_figure(figure, path)


def _row(way: Comparison) -> tuple[str, ...]:
    found, differences = way.difference, ("", "", "")
    if found is not None:
        coverage = f"{1 - 2 * found.alpha:.1%}"
        differences = (f"{found.mean:+.2g}", f"{found.low:+.2g} .. {found.high:+.2g}", coverage)
    name = f"  control: {way.control}" if way.control else way.name
    means = (f"{way.question.mean(way.reference):.5g}", f"{way.mean:.5g}")
    return (name, str(way.seeds), *means, *differences, way.verdict)


def _conclusion(one: Comparison) -> str:
    found, reason = one.difference, one.reason
    if one.verdict == "worse" and reason:
        return f"{one.name} is worse than float32: it {reason}."
    said = {
        "equivalent": "trains as well as float32, within the margin",
        "better": "ends better than float32 by more than the margin, so it is not the same training",
        "worse": "is worse than float32 by more than the margin",
        "not yet known": "is not yet known to train as well as float32",
    }
    if not reason and one.verdict == "not yet known":
        more, last = one.more_seeds, max(run.seed for run in one.runs)
        reason = "the mean difference so far is about as large as the margin, so more seeds are not likely to tell"
        if more is not None:
            reason = f"about {plural(more, 'seed')} would tell; take new ones, from seed {last + 1}"
    if not reason and one.verdict == "equivalent" and found is not None and (found.low > 0 or found.high < 0):
        reason = f"the difference, {found.mean:+.2g}, is more than chance"
    return f"{one.name} {said[one.verdict]}{f': {reason}' if reason else ''}."
