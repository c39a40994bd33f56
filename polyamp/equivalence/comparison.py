"""The verdict about one way of training next to float32, and the margin that it is held to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from polyamp.equivalence.design import FEWEST_TO_AGREE, Design
from polyamp.equivalence.statistics import Difference, paired, seeds_to_tell, unpaired
from polyamp.equivalence.training import Metric, Run, known_better
from polyamp.errors import InvalidValueError
from polyamp.report import finite, plural
from polyamp.validation import is_number, shown

Verdict = Literal["equivalent", "worse", "better", "not yet known"]
UNKNOWN: Verdict = "not yet known"
REPEATS = (
    "float32 gave one and the same value for every seed: does train use its seed? If it does, a metric such as the "
    "loss shows more"
)


@dataclass(frozen=True)
class Margin:
    """How far the mean of the metric may be from float32's, in either direction."""

    amount: float  # in the metric's unit, or the share of float32's mean
    is_share: bool = False  # which of the two

    @classmethod
    def of(cls, given: float | str | Margin) -> Margin:
        """Return the margin that a number, or a percentage such as "0.5%", stands for."""
        if isinstance(given, Margin):
            return given
        is_share = isinstance(given, str) and given.strip().endswith("%")
        try:
            amount = float(given.strip().rstrip("%")) if isinstance(given, str) else given
        except ValueError:
            amount = math.nan
        if not (is_number(amount) and 0 < amount < math.inf):
            raise InvalidValueError(
                "invalid margin",
                where="parity(margin=)",
                found=shown(given),
                allowed="a number greater than 0 in the metric's unit, or a share of float32's mean, as in '0.5%'",
                fix="state the largest difference that would not matter to you",
            )
        return cls(amount / 100 if is_share else float(amount), is_share)

    def at(self, mean: float) -> float:
        """Return the margin in the metric's unit, for this mean of float32."""
        return self.amount * abs(mean) if self.is_share else self.amount


class Decision(NamedTuple):
    """A verdict and, where numbers alone do not show it, the reason."""

    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True)
class Comparison:
    """Runs of one policy, or of one negative control of it, next to runs in float32."""

    policy: str  # the policy's text
    runs: tuple[Run, ...]  # in order of the seeds
    reference: tuple[Run, ...]  # the runs in float32: of the same seeds if they are paired
    metric: Metric  # what is compared
    margin: Margin  # how far the means may be apart
    design: Design  # when it is looked at
    control: str = ""  # name of the negative control; empty for the policy itself
    is_paired: bool = True  # whether run and reference in the same place share weights and order of data
    # whether the control met an optimizer that polyamp wraps; without one it was not in effect
    was_reached: bool = True

    @property
    def name(self) -> str:
        """The policy's text, cut where it is long; for a control its name."""
        return self.control or shortened(self.policy)

    @property
    def seeds(self) -> int:
        """The number of seeds that were trained."""
        return len(self.runs)

    @property
    def mean(self) -> float:
        """The mean of the metric, inf or NaN if a run diverged."""
        return mean_of(self.runs)

    @property
    def limit(self) -> float:
        """The margin in the metric's unit."""
        return self.margin.at(mean_of(self.reference))

    @cached_property
    def difference(self) -> Difference | None:
        """The mean difference from float32 with its interval; None with fewer than two seeds or after divergence."""
        values, reference = ([run.value for run in runs] for runs in (self.runs, self.reference))
        if min(len(values), len(reference)) < 2 or not all(map(math.isfinite, values + reference)):
            return None
        compare = paired if self.is_paired else unpaired
        return compare(values, reference, alpha=self.design.alpha_at(self.seeds) or self.design.alpha)

    @property
    def verdict(self) -> Verdict:
        """Whether the means are equivalent, or which one is worse by more than the margin."""
        return self._decision.verdict

    @property
    def reason(self) -> str:
        """Why, if the numbers alone do not show it; else empty."""
        return self._decision.reason

    @property
    def is_decided(self) -> bool:
        """Return whether the verdict is clear."""
        return self.verdict != UNKNOWN

    @property
    def more_seeds(self) -> int | None:
        """Return how many seeds would tell, with a chance of 80 %; None if the verdict is clear, or no number would."""
        if self.is_decided or self.reason or self.difference is None:
            return None
        return seeds_to_tell(self.difference, self.limit, self.seeds)

    @cached_property
    def _decision(self) -> Decision:
        if diverged := _seeds(self.reference):
            return Decision(UNKNOWN, f"float32 itself ended without a finite {self.metric.name}: {diverged}")
        if diverged := _seeds(self.runs):
            return Decision("worse", f"ended without a finite {self.metric.name}: {diverged}")
        if self.limit == 0:
            return Decision(UNKNOWN, "the margin is a share of float32's mean, which is 0; state it as a number")
        found = self.difference
        if found is None or self.design.alpha_at(self.seeds) is None:
            return Decision(UNKNOWN)
        is_last = self.seeds >= self.design.seeds
        if found.error == 0 and not is_last:  # rounded metrics may be equal at first
            return Decision(UNKNOWN)
        if found.beyond(self.limit):
            return Decision("better" if (found.mean > 0) == (self.metric.better == "higher") else "worse")
        if found.error == 0 and found.within(self.limit) and self.is_paired and _repeats(self.reference):
            return Decision(UNKNOWN, REPEATS)
        if found.within(self.limit) and (is_last or self.seeds >= FEWEST_TO_AGREE):
            return Decision("equivalent", _if_identical(self.runs, self.reference, self.is_paired))
        return Decision(UNKNOWN)

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
            "was_reached": self.was_reached,
            "runs": [as_json(run) for run in self.runs],
        }


def shortened(policy: str, longest: int = 60) -> str:
    """Return a policy's text, cut where it is long."""
    return policy if len(policy) <= longest else f"{policy[: longest - 1]}…"


def mean_of(runs: Sequence[Run]) -> float:
    """Return the mean of the metric; NaN of no run."""
    return math.fsum(run.value for run in runs) / len(runs) if runs else math.nan


def as_json(run: Run) -> dict[str, Any]:
    """Return a run as JSON values; a metric that is not finite becomes None."""
    metrics = {name: finite(value) for name, value in run.metrics.items()}
    return {**run._asdict(), "value": finite(run.value), "metrics": metrics}


def _seeds(runs: Sequence[Run]) -> str:
    """Return which runs diverged; empty if none did."""
    diverged = [run for run in runs if not run.is_finite]
    if not diverged:
        return ""
    which = f"{len(diverged)} of {plural(len(runs), 'run')} (seed {', '.join(str(run.seed) for run in diverged)})"
    return f"{which}: {diverged[0].failure}" if diverged[0].failure else which


def _repeats(runs: Sequence[Run]) -> bool:
    """Return whether all runs are equal in every metric, so that they are one draw and not several."""
    return all(_quality(run) == _quality(runs[0]) for run in runs)


def _quality(run: Run) -> tuple[float, Mapping[str, float]]:
    """Return the metric and those beside it that tell how good the model is; times vary from run to run."""
    return run.value, {name: value for name, value in run.metrics.items() if known_better(name)}


def _if_identical(runs: Sequence[Run], reference: Sequence[Run], is_paired: bool) -> str:
    pairs = zip(runs, reference, strict=True) if is_paired else ()
    same = [_quality(one) == _quality(other) for one, other in pairs]
    return "every seed has the value of float32, as if the policy were not in effect" if same and all(same) else ""
