"""The result of `polyamp.parity`: a table, a conclusion for each policy, JSON and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from polyamp.equivalence.comparison import UNKNOWN, Comparison, Verdict, as_json, mean_of
from polyamp.equivalence.statistics import Difference
from polyamp.equivalence.training import Run
from polyamp.report import Report, finite, plural

if TYPE_CHECKING:
    from os import PathLike

ASSUMPTIONS = (
    "the seeds are independent draws of what training varies; nothing is shown for other data or settings",
    "mean differences follow a t distribution: runs in 16 bits that fail only once in a while are not excluded",
    "every policy is judged by itself: of 20 verdicts at the edge of the margin one is wrong, at 5 %",
)


@dataclass(frozen=True)
class Parity(Report):
    """The result of `polyamp.parity`. Prints as a table with its conclusions.

    Attributes:
        name: of the training function.
        float32: the runs in float32, in order of the seeds.
        ways: every comparison, those of negative controls included.
        again: float32 with the first seed a second time; None if it was not trained.
    """

    RIGHT = range(1, 7)

    name: str
    float32: tuple[Run, ...]
    ways: tuple[Comparison, ...]
    again: Run | None = None

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """The policies' comparisons, in the order in which they were named."""
        return tuple(way for way in self.ways if not way.control)

    def controls_of(self, comparison: Comparison) -> tuple[Comparison, ...]:
        """Return the negative controls of a policy."""
        return tuple(way for way in self.ways if way.control and way.policy == comparison.policy)

    def can_tell(self, comparison: Comparison) -> bool:
        """Return whether a negative control of this policy failed, or none was trained."""
        controls = self.controls_of(comparison)
        return not controls or any(map(failed, controls))

    @property
    def verdict(self) -> Verdict | Literal["cannot tell"]:
        """The verdict of all policies together: the most serious one.

        "cannot tell": the policies are equivalent to float32, but so are the negative controls of one of them.
        """
        found = {one.verdict for one in self.comparisons}
        serious: tuple[Verdict, ...] = ("worse", UNKNOWN)
        if doubtful := [verdict for verdict in serious if verdict in found]:
            return doubtful[0]
        if not all(map(self.can_tell, self.comparisons)):
            return "cannot tell"
        return "better" if found == {"better"} else "equivalent"

    def __bool__(self) -> bool:
        """Return whether every policy was shown to train as well as float32, on a task that could have failed."""
        return self.verdict in ("equivalent", "better")

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values, each run included."""
        first = self.ways[0]
        return {
            "name": self.name,
            "metric": first.metric.name,
            "better": first.metric.better,
            "alpha": first.design.alpha,
            "seeds": first.design.seeds,
            "stop_early": first.design.stop_early,
            "paired": first.is_paired,
            "verdict": self.verdict,
            "float32": {"mean": finite(mean_of(self.float32)), "runs": list(map(as_json, self.float32))},
            "float32_again": self.again and as_json(self.again),
            "comparisons": [{**way.as_dict(), "can_tell": self.can_tell(way)} for way in self.comparisons],
            "controls": [way.as_dict() for way in self.ways if way.control],
            "assumptions": list(ASSUMPTIONS),
        }

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw every seed's difference from float32, the mean with its interval, and the margin, into an image file.

        Raises:
            InvalidValueError: the file's ending does not name an image format.
            MissingFrameworkError: matplotlib is not installed.
        """
        from polyamp.equivalence.picture import draw

        draw(path, self.name, self.ways)

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table: the heading, then every policy with its negative controls below it.

        The column "float32" has the mean in float32 over the same seeds.
        """
        heading = ("policy", "seeds", "float32", "mean", "difference", "interval", "coverage", "verdict")
        return [heading, *map(_row, self.ways)]

    def heading(self) -> str:
        """Return what was compared with which margin."""
        first = self.ways[0]
        share = f" ({first.margin.amount * 100:.3g}% of float32's mean)" if first.margin.is_share else ""
        how = "in pairs, by seed" if first.is_paired else "not in pairs"
        rate = f"error rate {first.design.alpha:.0%} for each verdict"
        margin = f"margin {first.limit:.3g}{share}, compared {how}; {rate}"
        return f"parity of {self.name} with float32: {first.metric}\n{margin}"

    def sentences(self) -> list[str]:
        """Return a conclusion for each policy, and what is assumed."""
        return [*self._conclusions(), "", *self._assumptions()]

    def _conclusions(self) -> Iterator[str]:
        for one in self.comparisons:
            yield _conclusion(one)
            controls = self.controls_of(one)
            if controls and one.verdict in ("equivalent", UNKNOWN) and all(run.is_finite for run in self.float32):
                yield _sensitivity(one, controls)
        if self.again is not None:
            yield _repeated(self.float32[0], self.again)

    def _assumptions(self) -> Iterator[str]:
        first, *others = ASSUMPTIONS
        yield f"assumed: {first};"
        yield from (f"         {text}{'.' if text == others[-1] else ';'}" for text in others)


def failed(way: Comparison) -> bool:
    """Return whether training was told apart from float32, as a negative control must be."""
    return way.was_reached and way.verdict in ("worse", "better")


def _row(way: Comparison) -> tuple[str, ...]:
    found = way.difference
    differences = ("", "", "")
    if found is not None:
        coverage = f"{1 - 2 * found.alpha:.1%}"
        differences = (f"{found.mean:+.2g}", f"{found.low:+.2g} .. {found.high:+.2g}", coverage)
    name = f"  control: {way.control}" if way.control else way.name
    means = (f"{mean_of(way.reference):.5g}", f"{way.mean:.5g}")
    return (name, str(way.seeds), *means, *differences, way.verdict if way.was_reached else "not in effect")


def _conclusion(one: Comparison) -> str:
    if one.verdict == "worse" and one.reason:
        return f"{one.name} is worse than float32: it {one.reason}."
    said = {
        "equivalent": "trains as well as float32, within the margin",
        "better": "ends better than float32 by more than the margin, so it is not the same training",
        "worse": "is worse than float32 by more than the margin",
        UNKNOWN: "is not yet known to train as well as float32",
    }
    ending = one.reason or (_how_many(one) if one.verdict == UNKNOWN else _nonzero(one))
    return f"{one.name} {said[one.verdict]}{f': {ending}' if ending else ''}."


def _nonzero(one: Comparison) -> str:
    """Return that a difference within the margin is more than chance; empty if it may be zero."""
    found = one.difference
    is_small = one.verdict == "equivalent" and found is not None and _excludes_zero(found)
    return f"the difference, {found.mean:+.2g}, is more than chance" if is_small and found else ""


def _excludes_zero(found: Difference) -> bool:
    return found.low > 0 or found.high < 0


def _how_many(one: Comparison) -> str:
    more = one.more_seeds
    if more is None:
        return "the mean difference so far is about as large as the margin, so more seeds are not likely to tell"
    last = max(run.seed for run in one.runs)
    return f"about {plural(more, 'seed')} would tell; take new ones, from seed {last + 1}"


def _sensitivity(one: Comparison, controls: Sequence[Comparison]) -> str:
    told = [control.name for control in controls if failed(control)]
    missed = [f"{control.name} ({_why_missed(control)})" for control in controls if not failed(control)]
    if not told:
        advice = " A smaller margin, a smaller learning rate or more steps may tell."
        ending = advice if any(control.was_reached for control in controls) else ""
        return f"This task cannot tell: no negative control of {one.name} failed: {', '.join(missed)}.{ending}"
    ending = f" Not noticed: {', '.join(missed)}." if missed else ""
    return f"The task can tell: {one.name} fails with {', '.join(told)}.{ending}"


def _why_missed(control: Comparison) -> str:
    found = control.difference
    if control.was_reached and control.verdict == "equivalent" and found is not None and _excludes_zero(found):
        least = min(abs(found.low), abs(found.high))
        return f"equivalent, but it differs by {found.mean:+.2g}: a margin below {least:.2g} would tell"
    return control.verdict if control.was_reached else "not in effect: train has to call polyamp.wrap_optimizer"


def _repeated(first: Run, again: Run) -> str:
    if not first.is_finite and not again.is_finite:
        return f"float32 with seed {first.seed}, twice: not finite."
    if first.value == again.value:
        return f"float32 with seed {first.seed}, twice: equal to the last bit."
    return (
        f"float32 with seed {first.seed}, twice: {first.value:.6g} and {again.value:.6g}; the seed does not "
        "decide all, so pairs tell less."
    )
