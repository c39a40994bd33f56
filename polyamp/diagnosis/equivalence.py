"""The statistics of `polyamp.parity`: two one-sided t-tests of a difference of means, and when they are made.

Worked example: five seeds, each trained in float32 and in 16 bits. The losses differ by 0.001 on average. The margin is
0.01.

>>> found = paired([0.001, 0.002, -0.001, 0.002, 0.001], alpha=0.05)
>>> f"{found.mean:+.4f}, {found.low:+.4f} .. {found.high:+.4f}"
'+0.0010, -0.0002 .. +0.0022'
>>> found.within(0.01), found.p_equivalent(0.01) < 0.001
(True, True)

The interval at level ``alpha`` has coverage ``1 - 2 alpha``: it lies within the margin if, and only if, both one-sided
tests reject at ``alpha`` (Schuirmann 1987, the two one-sided tests procedure, TOST).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from statistics import mean, variance
from typing import Any

from polyamp.errors import missing

POWER = 0.8  # the chance of a clear verdict for which `seeds_to_tell` plans, the usual one (Cohen 1988)
MOST_SEEDS = 10_000
FIRST_LOOK = 3  # with two seeds the t distribution is too wide to tell anything
FEWEST_TO_AGREE = 5  # an early look at fewer seeds would too often miss a rare bad run
EARLY_SHARE = 0.2  # the share of alpha that the looks before the last have together


def alpha_at(look: int, seeds: int, alpha: float, stop_early: bool) -> float | None:
    """Return the error rate for a verdict after ``look`` of ``seeds`` seeds; None if none is due."""
    # A test that is repeated after every seed until it passes passes too often. By the inequality of Bonferroni the
    # first verdict is wrong with a chance of at most the sum of the looks' rates, which is alpha.
    early = range(FIRST_LOOK, seeds) if stop_early else range(0)
    if look == seeds:
        return alpha * (1 - EARLY_SHARE) if early else alpha
    return alpha * EARLY_SHARE / len(early) if look in early else None


@dataclass(frozen=True)
class Difference:
    """The mean difference between runs in 16 bits and in float32, with its confidence interval."""

    mean: float  # of the runs in 16 bits minus that of the runs in float32, in the metric's unit
    error: float  # standard error of the mean difference
    freedom: float  # degrees of freedom of its t distribution
    alpha: float  # one-sided error rate of the interval

    @cached_property
    def reach(self) -> float:
        """Half of the interval's length."""
        return _quantile(1 - self.alpha, self.freedom) * self.error if self.error else 0.0

    @property
    def low(self) -> float:
        """Lower end of the interval with coverage ``1 - 2 alpha``."""
        return self.mean - self.reach

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return self.mean + self.reach

    def within(self, margin: float) -> bool:
        """Return whether the interval lies within the margin on both sides: then the means are equivalent."""
        return -margin < self.low and self.high < margin

    def beyond(self, margin: float) -> bool:
        """Return whether the interval lies outside the margin, on one side."""
        return self.low >= margin or self.high <= -margin

    def p_equivalent(self, margin: float) -> float:
        """Return the larger p-value of the two one-sided tests; equivalent if it is less than ``alpha``."""
        inside = margin - abs(self.mean)  # of the end that is nearer, whose p-value is the larger one
        return float(student().sf(inside / self.error, self.freedom)) if self.error else float(inside <= 0)


def paired(differences: Sequence[float], *, alpha: float) -> Difference:
    """Return the mean of differences between runs of the same seed (same weights, same order of data)."""
    error = math.sqrt(variance(differences) / len(differences))
    return Difference(mean(differences), error, len(differences) - 1, alpha)


def seeds_to_tell(found: Difference, margin: float, seeds: int) -> int | None:
    """Return how many seeds would decide, with a chance of `POWER`, if the mean and the spread stay as they are."""
    distance = abs(margin - abs(found.mean))
    deviation = found.error * math.sqrt(seeds)

    def tells(seeds: int) -> bool:
        quantiles = _quantile(1 - found.alpha, seeds - 1) + _quantile(POWER, seeds - 1)
        return quantiles * deviation <= distance * math.sqrt(seeds)

    numbers = range(seeds, MOST_SEEDS + 1)
    first = bisect_left(numbers, True, key=tells)  # more seeds tell more
    return numbers[first] if first < len(numbers) else None


@cache
def _quantile(probability: float, freedom: float) -> float:
    return float(student().ppf(probability, freedom))


def student() -> Any:
    """Return SciPy's t distribution."""
    try:
        from scipy.stats import t
    except ModuleNotFoundError as error:
        raise missing("scipy", extra="parity") from error
    return t
