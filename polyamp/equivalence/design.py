"""When `polyamp.parity` looks at the runs, and how much of its error rate each look may spend.

A test that is repeated after every seed until it passes passes too often. So each look has its own error rate, and
together they have ``alpha``: a fifth of it is shared by the looks before the last, and the last has the rest. By the
inequality of Bonferroni the verdict of the whole is wrong with a chance of at most ``alpha``, however the looks depend
on each other. The last look loses little: with ten seeds its interval is 1.08 times as long as without earlier looks.

>>> design = Design(seeds=10, alpha=0.05)
>>> design.alpha_at(2), f"{design.alpha_at(3):.4f}", f"{design.alpha_at(9):.4f}", f"{design.alpha_at(10):.4f}"
(None, '0.0014', '0.0014', '0.0400')
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_LOOK = 3
"""Seeds before the first look: with two, the t distribution is too wide to tell anything."""
FEWEST_TO_AGREE = 5
"""Seeds before an early look may find two ways equivalent, since fewer would too often miss a rare bad run."""
EARLY_SHARE = 0.2
"""Share of alpha that the looks before the last have together."""


@dataclass(frozen=True)
class Design:
    """The looks of one comparison."""

    seeds: int  # the seeds that are trained if no earlier look decides
    alpha: float  # chance of a wrong verdict, for each comparison
    stop_early: bool = True  # whether there is any look before the last

    def alpha_at(self, seeds: int) -> float | None:
        """Return the one-sided error rate of the look after so many seeds; None if there is no look."""
        early = range(FIRST_LOOK, self.seeds) if self.stop_early else range(0)
        if seeds == self.seeds:
            return self.alpha * (1 - EARLY_SHARE) if early else self.alpha
        return self.alpha * EARLY_SHARE / len(early) if seeds in early else None
