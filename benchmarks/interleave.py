"""Time variants of the same work in one process, in turns, so that load on the machine affects all of them alike.

For example, ``interleave("square", {"native": native, "ours": ours}, rounds=30, calls=100)`` times 100 calls of each in
every round, and returns for each variant its times and their ratios to ``native`` in the same round.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import track


@dataclass(frozen=True)
class Timing:
    """The times of one variant: microseconds of a call in each round, and their ratios to the first variant's."""

    question: str
    variant: str
    microseconds: list[float]
    ratios: list[float]

    def summary(self) -> dict[str, Any]:
        low, *_, high = statistics.quantiles(self.ratios, n=10, method="inclusive")
        return {
            "question": self.question,
            "variant": self.variant,
            "microseconds": round(statistics.median(self.microseconds), 2),
            "least_microseconds": round(min(self.microseconds), 2),
            "ratio": round(statistics.median(self.ratios), 3),
            "ratio_10_to_90_percent": [round(low, 3), round(high, 3)],
        }


def turns(names: Iterable[str], rounds: int, question: str) -> Iterator[str]:
    """Return every name once a round, in an order that rotates, so that load and clock changes affect all alike."""
    order = list(names)
    for turn in track(range(rounds), description=question, console=console()):
        shift = turn % len(order)
        yield from order[shift:] + order[:shift]


def calls_in(seconds: float, run: Callable[[], None], settle: Callable[[], None]) -> int:
    """Return the number of calls that take about ``seconds``."""
    run()
    settle()
    start = time.perf_counter()
    run()
    settle()
    return max(1, round(seconds / (time.perf_counter() - start)))


def interleave(
    question: str,
    variants: dict[str, Callable[[], Any]],
    rounds: int,
    calls: int,
    settle: Callable[[], Any] = lambda: None,
) -> list[Timing]:
    """Time every variant once a round; ``settle`` waits until a device is idle.

    The others are compared with the first variant, within each round.
    """
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for fn in variants.values():
        for _ in range(3):
            fn()
        settle()
    for name in turns(variants, rounds, question):
        fn, start = variants[name], time.perf_counter()
        for _ in range(calls):
            fn()
        settle()
        taken[name].append((time.perf_counter() - start) / calls * 1e6)
    return compared(question, taken)


def compared(question: str, taken: dict[str, list[float]], base: str | None = None) -> list[Timing]:
    """Return the times of every variant, compared round by round with those of ``base``, or of the first variant."""
    yardstick = taken[base or next(iter(taken))]
    return [
        Timing(question, name, own, [one / other for one, other in zip(own, yardstick, strict=True)])
        for name, own in taken.items()
    ]


def console() -> Console:
    """Return a console as wide as the terminal, or wide enough for the tables if there is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=120)


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
