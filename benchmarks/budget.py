"""Time limits: a part that is not expected to end in time is not started."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Budget:
    """The seconds that a whole run may take; None is without a limit.

    budget = Budget(600)
    if budget.fits(40):
        measure()
    """

    def __init__(self, seconds: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = math.inf if seconds is None else seconds
        self.clock, self.start = clock, clock()

    @property
    def left(self) -> float:
        """Seconds until the run should have ended."""
        return self.start + self.seconds - self.clock()

    def fits(self, estimate: float) -> bool:
        """Return whether a part that should take ``estimate`` seconds ends in time."""
        return estimate <= self.left

    def why_not(self, estimate: float) -> str:
        """Return the reason why a part is left out."""
        return f"about {estimate:.0f} s needed, {max(0.0, self.left):.0f} of {self.seconds:.0f} s left"


class Estimate:
    """The expected seconds of the next part of a kind: a guess at first, then the longest time so far."""

    def __init__(self, guess: float) -> None:
        self.guess = guess
        self.longest: float | None = None

    @property
    def seconds(self) -> float:
        return self.guess if self.longest is None else self.longest

    def learn(self, taken: float) -> None:
        """Record how long one part took."""
        self.longest = max(taken, self.longest or 0.0)
