"""The verb `parity`: train over seeds in float32 and under policies, and tell whether the results are equivalent."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from polyamp import controls as negative
from polyamp.diagnosis.probe import sixteen_bit
from polyamp.diagnosis.progress import Progress, progressing
from polyamp.equivalence.comparison import Comparison, Margin, shortened
from polyamp.equivalence.design import FIRST_LOOK, Design
from polyamp.equivalence.journal import Journal
from polyamp.equivalence.report import Parity, failed
from polyamp.equivalence.statistics import student
from polyamp.equivalence.training import Better, Metric, Run, Trainer
from polyamp.errors import PolyampError, PolyampWarning
from polyamp.formats import format_of
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy
from polyamp.validation import check_arguments, check_count, check_range, is_integer, is_number


def parity(
    train: Callable[..., Any],
    policy: Policy | str | Sequence[Policy | str] | None = None,
    *,
    seeds: int = 10,
    margin: float | str = "0.5%",
    metric: str | None = None,
    better: Better | None = None,
    alpha: float = 0.05,
    controls: bool = True,
    stop_early: bool = True,
    first_seed: int = 0,
    reference: Sequence[float] | None = None,
    keep: str | PathLike[str] | None = None,
    progress: Progress = True,
) -> Parity:
    """Train over seeds in float32 and under policies, and report whether the results are equivalent.

    Every seed is trained in float32 and in each other way, with the same weights and the same order of the data, so the
    results are compared in pairs. The verdict comes from two one-sided t-tests (TOST): the means are equivalent if the
    whole confidence interval of their difference lies within the margin; a difference that is merely not significant is
    not evidence of equality.

    Negative controls show that the task could fail: the same policy without loss scaling (float16), and with parameters
    that are rounded to 16 bits after every update. If none of them fails, equivalence on this task shows nothing.

    >>> def train(policy, seed):  # in place of a training that takes minutes
    ...     noise = (seed * 7919 % 13 - 6) * 1e-4
    ...     return {"loss": 2.0 + noise + (policy.compute == "float16") * (0.001 + noise / 2)}
    >>> found = parity(train, "mixed_float16", controls=False, progress=False)
    >>> found.comparisons[0].verdict, found.comparisons[0].seeds
    ('equivalent', 5)

    Args:
        train: ``train(policy, seed)``, or ``train(seed)`` for code that uses the current policy. It makes a fresh model
            from the seed, trains it with `polyamp.wrap_optimizer`, and returns the metric: a number (a loss), a
            mapping such as ``{"accuracy": 0.97}``, or one of the two and the wrapped optimizer (in JAX its state), from
            which skipped steps are counted.
        policy: one policy, or several; None is the current policy if it computes in 16 bits, else ``mixed_float16``.
        seeds: number of seeds, at least 3. Fewer are trained if the answer is clear.
        margin: the largest difference of means that would not matter, in the metric's unit; or, as in "0.5%", a share
            of float32's mean. State it before looking at results.
        metric: which metric to compare, if ``train`` returns several; None is the first.
        better: "higher" or "lower"; None is decided by the metric's name.
        alpha: chance of a wrong verdict for each comparison, all looks together (> 0, < 0.5).
        controls: whether to train the negative controls, and float32 twice with one seed.
        stop_early: whether to stop a comparison as soon as it is clear.
        first_seed: the seeds are this one and those that follow it.
        reference: values of float32 that you have already, at least two; they are then not trained, and the comparison
            is not paired (Welch's test).
        keep: a file to which every finished run is added. Runs that it has from an earlier call are not trained again:
            after an interruption, call the same again. A warning tells if the file of ``train`` was edited since.
        progress: True shows a bar on standard error (lines if that is not a terminal), False nothing; or a function
            that is called with ``(runs done, runs in all, text)``.

    Returns:
        A `Parity`. It prints as a table, and has `as_dict`, `save` and `plot`.

    Raises:
        InvalidTypeError: ``train`` is not such a function, or returns no metric.
        InvalidValueError: an argument is out of range, or a policy computes in float32.
        MissingFrameworkError: scipy is not installed (the extra ``parity``).

    Errors of ``train`` propagate. A loss scale that gives up, or a loss that is not finite, is a run that failed.

    Sources: the tests are Schuirmann's (1987), in the form of confidence intervals; negative and positive controls as
    in any assay (Lipsitch and others 2010).
    """
    chosen = _checked(policy, seeds, alpha, first_seed, reference)
    student()  # if scipy is missing, this fails now and not after hours of training
    study = _Study(
        Trainer(train, metric, better),
        Margin.of(margin),
        Design(seeds, alpha, stop_early),
        _ways(chosen, controls),
        Journal(None if keep is None else Path(keep)),
        given=reference,
        repeats=controls and reference is None,
    )
    every = seeds * (len(study.ways) + (reference is None)) + study.repeats
    with progressing(progress, every, "parity") as done:
        study.train(range(first_seed, first_seed + seeds), done)
    return study.report()


@dataclass(frozen=True)
class _Way:
    """A policy, and the way in which it is broken on purpose, if it is."""

    policy: Policy
    control: negative.Control | None = None

    @property
    def trained(self) -> Policy:
        """The policy that the training function receives."""
        return negative.policy_under(self.policy, self.control) if self.control else self.policy

    @contextmanager
    def in_effect(self) -> Iterator[Callable[[], bool]]:
        """Break mixed precision in the block. Provides a function that returns whether an optimizer was reached."""
        if self.control is None:
            yield lambda: True
            return
        with negative.broken(self.control) as tally, warnings.catch_warnings():
            warnings.simplefilter("ignore", PolyampWarning)  # broken on purpose: of no use to the user
            yield lambda: tally.reached > 0

    @property
    def broken_by(self) -> str:
        """The name of the negative control; empty without one."""
        return self.control.name if self.control else ""

    def __str__(self) -> str:
        name = shortened(str(self.policy))
        return f"{name}, {self.control.name}" if self.control else name


FLOAT32 = _Way(make_policy("float32"))
_POLICIES = "policies of 16 bits; float32 is trained in any case"


@dataclass
class _Study:
    """The runs of one call, as they come."""

    trainer: Trainer
    margin: Margin
    design: Design
    ways: tuple[_Way, ...]
    journal: Journal
    given: Sequence[float] | None = None
    repeats: bool = False  # whether float32 is trained a second time with the first seed
    float32: list[Run] = field(default_factory=list)
    runs: dict[_Way, list[Run]] = field(default_factory=dict)
    reached: set[_Way] = field(default_factory=set)
    again: Run | None = None

    def __post_init__(self) -> None:
        self.runs = {way: [] for way in self.ways}
        if self.given is not None:
            self.float32 = [Run(place, float(value), {}) for place, value in enumerate(self.given)]

    def train(self, seeds: range, done: Callable[[str], None]) -> None:
        """Train seed after seed in every way that is not yet clear."""
        for seed in seeds:
            open_ways = [way for way in self.ways if self._is_open(way)]
            if not open_ways:
                return
            if self.given is None:
                self.float32.append(self._run(FLOAT32, seed, done))
                if len(self.float32) == 1 and self.repeats:
                    self.again = self._run(FLOAT32, seed, done, again=True)
            for way in open_ways:
                self.runs[way].append(self._run(way, seed, done))

    def _is_open(self, way: _Way) -> bool:
        """Return whether more runs would tell more. A control serves to doubt that its policy is equivalent."""
        found = self.comparison(way)
        if found.is_decided or not found.was_reached or not all(run.is_finite for run in self.float32):
            return False
        return way.control is None or not failed(self.comparison(_Way(way.policy)))

    def _run(self, way: _Way, seed: int, done: Callable[[str], None], *, again: bool = False) -> Run:
        """Train once, or take the run from the journal."""
        key = (self.trainer.name, str(way.policy), "again" if again else way.broken_by, seed)
        which = f"seed {seed}, {way}{' again' if again else ''}"
        if is_new := key not in self.journal.runs:
            with way.in_effect() as was_reached, _named(which):
                run = self.trainer(way.trained, seed, may_fail=way != FLOAT32)
                self.journal.add(key, run, was_reached(), self.trainer.source)
        run, reached = self.journal.take(key, self.trainer.source)
        run = self.trainer.read(run)
        if reached:
            self.reached.add(way)
        done(f"{which}: {run.value:.6g}{'' if is_new else ' (kept)'}")
        return run

    def comparison(self, way: _Way) -> Comparison:
        """Return what the runs of one way show so far."""
        runs = tuple(self.runs[way])
        reference = self.float32 if self.given is not None else self.float32[: len(runs)]
        return Comparison(
            str(way.policy),
            runs,
            tuple(reference),
            self.trainer.metric or Metric("value", "lower"),
            self.margin,
            self.design,
            control=way.broken_by,
            is_paired=self.given is None,
            was_reached=not runs or way in self.reached,
        )

    def report(self) -> Parity:
        """Return the report of all runs."""
        return Parity(self.trainer.name, tuple(self.float32), tuple(map(self.comparison, self.ways)), self.again)


@contextmanager
def _named(which: str) -> Iterator[None]:
    """Tell in errors of the training function which run failed."""
    try:
        yield
    except Exception as error:
        advice = "" if isinstance(error, PolyampError) else "; if training diverged, return NaN as the metric"
        error.add_note(f"in polyamp.parity, {which}{advice}")
        raise


def _ways(policies: Sequence[Policy], controls: bool) -> tuple[_Way, ...]:
    """Return every policy, each followed by its negative controls."""
    broken = {policy: negative.for_policy(policy) if controls else () for policy in policies}
    return tuple(_Way(policy, control) for policy in policies for control in (None, *broken[policy]))


def _checked(
    policy: Policy | str | Sequence[Policy | str] | None,
    seeds: object,
    alpha: object,
    first_seed: object,
    reference: Sequence[float] | None,
) -> list[Policy]:
    """Return the policies, once every argument is known to be right."""
    given = list(policy) if isinstance(policy, Sequence) and not isinstance(policy, str) else [policy]
    chosen = list(dict.fromkeys(map(sixteen_bit, given)))
    check_count("seeds", seeds, where="parity(seeds=)")
    check_range("seeds", seeds, FIRST_LOOK, 10_000, where="parity(seeds=)")
    check_range("alpha", alpha, 1e-6, 0.49, where="parity(alpha=)")
    names = list(map(str, chosen))
    checks = [
        ("policy", names, all(format_of(one.compute).is_low for one in chosen) and chosen, _POLICIES),
        ("first_seed", first_seed, is_integer(first_seed), "an integer"),
        ("reference", reference, reference is None or _are_numbers(reference), "at least two finite numbers, or None"),
    ]
    check_arguments("parity", checks)
    return chosen


def _are_numbers(values: Sequence[Any]) -> bool:
    return len(values) > 1 and all(is_number(value) and math.isfinite(value) for value in values)
