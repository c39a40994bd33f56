"""The shared part of the benchmarks of whole training steps: variants in turns, their rows and their tables."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import typer
from interleave import Budget, Estimate, Timing, calls_in, compared, turns
from keeping import Keeper, Row
from rich.box import SIMPLE_HEAD
from rich.table import Table

BATCHES = 8  # used in turns when losses are compared
LAST = 10  # the last steps, whose mean loss is reported


def chosen(asked: Iterable[str] | None, known: Iterable[str]) -> list[str]:
    """Return the names that begin with one that was asked for, in the order of ``known``; all if none was.

    >>> chosen(["bert"], ["resnet50", "bert-large-128", "bert-large-512"])
    ['bert-large-128', 'bert-large-512']
    """
    known, asked = list(known), list(asked or [""])
    if unknown := [name for name in asked if not any(one.startswith(name) for one in known)]:
        raise typer.BadParameter(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
    return [one for one in known if any(one.startswith(name) for name in asked)]


class Loop(Protocol):
    """A training step that is called again and again."""

    batch: Any

    def __call__(self) -> Any:
        """Take a step and return its loss, which may not be computed yet."""

    def loss_scale(self) -> float | None:
        """Read the loss scale, which waits for the device; None if there is none."""


class Case(NamedTuple):
    """A model in one way, such as compiled, with the tools to measure it."""

    model: str
    way: str
    keeper: Keeper
    budget: Budget
    settle: Callable[[], Any]
    free_memory: Callable[[], Any]

    def place(self, variant: str | None = None) -> Row:
        return {"model": self.model, "way": self.way, "variant": variant}

    def attempt(self, work: Callable[[], Any], variant: str | None = None) -> Any:
        return self.keeper.attempt(self.place(variant), work)

    def each(self, variants: Iterable[str], guess: float, reserve: float, work: Callable[[str], Any]) -> dict[str, Any]:
        """Do ``work`` for every variant for which there is time.

        ``guess`` is the expected seconds for the first; each finished variant needs ``reserve`` seconds afterwards.
        """
        done: dict[str, Any] = {}
        estimate = Estimate(guess)
        for variant in variants:
            needed = estimate.seconds + reserve * (len(done) + 1)
            if not self.budget.fits(needed):
                self.keeper.leave_out(self.place(variant), self.budget.why_not(needed))
                continue
            start = self.budget.clock()
            result = self.attempt(lambda variant=variant: work(variant), variant)
            estimate.learn(self.budget.clock() - start)
            if result is not None:
                done[variant] = result
            self.free_memory()
        return done

    def timed(self, loops: dict[str, Loop], rounds: int, seconds: float) -> Iterator[Row]:
        """Time the variants in turns, each for about ``seconds`` in a round, and compare them."""
        calls = {variant: calls_in(seconds, loop, self.settle) for variant, loop in loops.items()}
        before = {variant: loop.loss_scale() for variant, loop in loops.items()}
        taken = self.in_turns(loops, calls, rounds)
        for timing in against_bases(taken):
            variant, done = timing.variant, len(timing.microseconds)
            skips = skips_between(before[variant], loops[variant].loss_scale())
            rate = round(skips / (calls[variant] * done), 4)
            yield self.place(variant) | summarised(timing, taken) | {"rounds": done, "skip_rate": rate}

    def in_turns(self, loops: dict[str, Loop], calls: dict[str, int], rounds: int) -> dict[str, list[float]]:
        """Return microseconds of a step in every round: at least two rounds, then as many as there is time for."""
        taken: dict[str, list[float]] = {variant: [] for variant in loops}
        for turn, variant in enumerate(turns(loops, rounds, f"{self.model}, {self.way}")):
            if turn >= 2 * len(loops) and not turn % len(loops) and not self.budget.fits(one_round(taken, calls)):
                break
            start = time.perf_counter()
            for _ in range(calls[variant]):
                loops[variant]()
            self.settle()
            taken[variant].append((time.perf_counter() - start) / calls[variant] * 1e6)
        return taken


def one_round(taken: dict[str, list[float]], calls: dict[str, int]) -> float:
    """Return the seconds of the longest round so far, or slightly more."""
    return sum(max(times) * calls[variant] for variant, times in taken.items()) / 1e6


def format_of(variant: str) -> str:
    """Return the format of a variant, with whose peak rate it is compared.

    >>> format_of("native float16"), format_of("TF32")
    ('float16', 'TF32')
    """
    return variant.rpartition(" ")[2]


def base_of(variant: str, known: Iterable[str]) -> str:
    """Return the variant to compare with: by hand in the same format, TF32 for float32; itself if that is missing.

    >>> base_of("polyamp float16", ["TF32", "native float16", "polyamp float16"])
    'native float16'
    """
    wanted = f"native {format_of(variant)}" if " " in variant else "TF32"
    return wanted if wanted in known else variant


def against_bases(taken: dict[str, list[float]]) -> Iterator[Timing]:
    """Compare every variant with its base, round by round."""
    for variant, times in taken.items():
        base = base_of(variant, taken)
        yield compared("", {variant: times, base: taken[base]}, base)[0]


def summarised(timing: Timing, taken: dict[str, list[float]]) -> Row:
    """Return a variant's time, and its ratios to its base and to both kinds of float32."""
    summary = timing.summary()
    own = statistics.median(timing.microseconds)
    times = {
        f"times_{base.lower()}": round(statistics.median(taken[base]) / own, 3) if base in taken else None
        for base in ("float32", "TF32")
    }
    return {
        "ms": round(own / 1e3, 3),
        "compared_with": base_of(timing.variant, taken),
        "ratio": summary["ratio"],
        "ratio_10_to_90_percent": summary["ratio_10_to_90_percent"],
        **times,
    }


def rates(row: Row, samples: int, operations: float | None, peak: float) -> Row:
    """Return samples per second, and the reached share of ``peak`` operations per second."""
    share = None if operations is None else float(f"{operations / (row['ms'] / 1e3) / peak:.3g}")
    return {
        "samples_per_second": round(samples / row["ms"] * 1e3, 1),
        "share_of_peak": share,
        "operations": operations,
    }


def skips_between(before: float | None, after: float | None) -> int:
    """Return how often a loss scale was halved; it halves at an overflow, and must not have grown.

    >>> skips_between(65536.0, 16384.0)
    2
    """
    if not before or not after:
        return 0
    return max(0, round(math.log2(before / after)))


def settled(loop: Loop, most: int = 24) -> int:
    """Step until four steps in a row were applied, since a first loss scale is often too large; return their number."""
    applied = 0
    for step in range(1, most + 1):
        before = loop.loss_scale()
        loop()
        applied = 0 if skips_between(before, loop.loss_scale()) else applied + 1
        if applied == 4:
            return step
    return most


def trained(loop: Loop, batches: list[Any], steps: int) -> Row:
    """Train; return the loss of the first step and of the last ones, and the share of skipped steps."""
    losses, skipped, start = [], 0, time.perf_counter()
    for step in range(steps):
        loop.batch, before = batches[step % len(batches)], loop.loss_scale()
        losses.append(loop())
        skipped += bool(skips_between(before, loop.loss_scale()))
    values = [float(loss) for loss in losses]
    return {
        "steps": steps,
        "first_loss": known(values[0]),
        "last_loss": known(statistics.mean(values[-LAST:])),
        "skip_rate": round(skipped / steps, 4),
        "seconds": round(time.perf_counter() - start, 1),
    }


def known(loss: float) -> float | None:
    """Return a rounded loss for JSON; None if it is not finite."""
    return round(loss, 5) if math.isfinite(loss) else None


def table(found: list[Row], title: str, memory: str = "peak_bytes") -> Table:
    headings = ("model", "way", "variant", "ms", "a second", "/ base", "10-90 %", "x f32", "x TF32", "GB", "syncs")
    caption = "base: by hand in the same format; TF32 for float32. peak: share of the rate of the fastest product."
    made = Table(*headings, "peak", "skips", title=title, caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in found:
        made.add_row(*cells(row, memory), end_section=row["variant"].startswith("polyamp"))
    return made


def cells(row: Row, memory: str) -> list[str]:
    low, high = row["ratio_10_to_90_percent"]
    held = row[memory]
    return [
        *(row["model"], row["way"], row["variant"], f"{row['ms']:.2f}", f"{row['samples_per_second']:.0f}"),
        *(f"{row['ratio']:.3f}", f"{low:.3f}-{high:.3f}"),
        *(shown(row[f"times_{base}"], "{:.2f}") for base in ("float32", "tf32")),
        shown(None if held is None else held / 1e9, "{:.2f}"),
        shown(row.get("host_syncs"), "{}"),
        shown(row["share_of_peak"], "{:.1%}"),
        f"{row['skip_rate']:.1%}",
    ]


def shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def losses_table(found: list[Row], title: str) -> Table:
    """Return a table of losses, and the difference of each from IEEE float32 in the same way."""
    headings = ("model", "way", "variant", "steps", "first loss", "last loss", "- float32", "skips")
    exact = {(row["model"], row["way"]): row["last_loss"] for row in found if row["variant"] == "float32"}
    made = Table(*headings, box=SIMPLE_HEAD, title=title, caption=f"last: the mean of the last {LAST} steps")
    for row in found:
        base = exact.get((row["model"], row["way"]))
        last = row["last_loss"]
        apart = shown(None if base is None or last is None else last - base, "{:+.4f}")
        values = (str(row["steps"]), *(shown(row[key], "{:.4f}") for key in ("first_loss", "last_loss")), apart)
        made.add_row(row["model"], row["way"], row["variant"], *values, f"{row['skip_rate']:.1%}")
    return made
