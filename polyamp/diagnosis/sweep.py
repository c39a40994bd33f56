"""The sweep: train at several static loss scales and find those that reach the loss of float32."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from polyamp import registry
from polyamp.diagnosis.health import health
from polyamp.diagnosis.probe import Probe
from polyamp.diagnosis.progress import Progress, progressing
from polyamp.diagnosis.window import Window
from polyamp.errors import InvalidTypeError, InvalidValueError, PolyampError
from polyamp.layout import JsonReport, aligned, power
from polyamp.validation import as_number, check_arguments, shown

if TYPE_CHECKING:
    from os import PathLike

SCALES = tuple(2.0**exponent for exponent in range(-4, 31, 4))
"""The scales that `sweep` tries by default."""

Outcome = Literal["ok", "too small", "too large", "failed"]


class Trial(NamedTuple):
    """One training run of a sweep."""

    scale: float  # the static loss scale
    loss: float | None  # the final loss, possibly inf or NaN; None if the run failed
    skipped: int | None = None  # number of skipped steps; None if ``train`` did not return it
    failure: str = ""  # the text of the polyamp error that ended the run; empty if none did
    steps: int | None = None  # number of all steps, including skipped ones; None if ``train`` did not return it

    @property
    def is_finite(self) -> bool:
        """Return whether the final loss is finite."""
        return self.loss is not None and math.isfinite(self.loss)

    def __str__(self) -> str:
        reached = "failed" if self.loss is None else f"loss {self.loss:.4f}"
        return f"scale {power(self.scale)}: {reached}{f', {self.skipped} skipped' if self.skipped else ''}"


@dataclass(frozen=True)
class Sweep(JsonReport):
    """The result of `sweep`. Prints as a table."""

    trials: tuple[Trial, ...]  # in order of ascending scale
    reference: float | None  # the loss to reach; None if no run ended with a finite loss
    # how far a loss may be from it, in either direction, in the loss's own unit (nats of a cross-entropy). A better
    # loss is not parity either: underflow can act as a regulariser
    tolerance: float = 0.01
    probe: Probe | None = None  # a probe of the same model, to compare with
    measured: bool = True  # whether the reference was given; else it is just the best loss of these trials

    @cached_property
    def outcomes(self) -> tuple[Outcome, ...]:
        """Return the outcome of each trial."""
        # "ok": its loss is within the tolerance of the reference, and steps were applied. "too large": its loss is not
        # finite, or it skipped steps, or its scale is above the ok ones (the best one, if none is ok). "too small":
        # every other one. "failed": it ended with a polyamp error.
        return tuple(map(self._outcome, self.trials))

    def _outcome(self, trial: Trial) -> Outcome:
        if trial.failure:
            return "failed"
        if self._is_ok(trial):
            return "ok"
        above = trial.scale > self._pivot
        return "too large" if not trial.is_finite or trial.skipped or above else "too small"

    def _is_ok(self, trial: Trial) -> bool:
        return trial.is_finite and abs(self.difference(trial)) <= self.tolerance and not self._skipped_all(trial)

    def _skipped_all(self, trial: Trial) -> bool:
        """Return whether no step was applied, so that the loss is that of an untrained model."""
        # If ``train`` did not return the number of steps, this is assumed of a trial that skipped more than some other
        # trial did and has exactly the same loss as one that skipped as many.
        if not trial.skipped:
            return False
        if trial.steps is not None:
            return trial.skipped >= trial.steps
        alike = [one for one in self.trials if one != trial and (one.skipped, one.loss) == (trial.skipped, trial.loss)]
        return bool(alike) and any(one.skipped is not None and one.skipped < trial.skipped for one in self.trials)

    def difference(self, trial: Trial) -> float:
        """Return by how much a trial's loss is above the reference; NaN if either is missing."""
        return math.nan if trial.loss is None or self.reference is None else trial.loss - self.reference

    @cached_property
    def _pivot(self) -> float:
        ok = [trial.scale for trial in self.trials if self._is_ok(trial)]
        finite = [trial for trial in self.trials if trial.is_finite]
        best = min(finite, key=lambda trial: abs(self.difference(trial)), default=None)
        return max(ok) if ok else best.scale if best else 0.0

    @cached_property
    def window(self) -> Window | None:
        """Return the ends of the longest run of ok scales (of equal runs, the upper one); None if none is ok."""
        runs: list[list[float]] = [[]]
        for trial, outcome in zip(self.trials, self.outcomes, strict=True):
            if outcome == "ok":
                runs[-1].append(trial.scale)
            elif runs[-1]:
                runs.append([])
        longest = max(reversed(runs), key=len)
        return Window(longest[0], longest[-1]) if longest else None

    @property
    def probed(self) -> Window | None:
        """Return the probe's window, if there is a probe."""
        return self.probe.window if self.probe else None

    @cached_property
    def unsafe(self) -> tuple[Trial, ...]:
        """Return the trials inside the probed window that are not ok: there the probe was wrong."""
        window = self.probed
        tried = zip(self.trials, self.outcomes, strict=True)
        return tuple(trial for trial, outcome in tried if window and trial.scale in window and outcome != "ok")

    def as_dict(self) -> dict[str, Any]:
        """Return the sweep as JSON values; losses that are not finite become text."""
        rows = zip(self.trials, self.outcomes, strict=True)
        return {
            "reference": self.reference,
            "measured": self.measured,
            "tolerance": self.tolerance,
            "window": _limits(self.window),
            "probed": _limits(self.probed),
            "trials": [{**trial._asdict(), "loss": _number(trial.loss), "outcome": outcome} for trial, outcome in rows],
        }

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the final loss over log2 of the scale, with the reference and the probed window, into an image file."""
        from polyamp.diagnosis.pictures import Mark, draw_sweep

        tried = zip(self.trials, self.outcomes, strict=True)
        runs = [Mark(trial.scale, trial.loss, outcome) for trial, outcome in tried]
        label = "float32" if self.measured else "best of the sweep"
        draw_sweep(path, runs, None if self.reference is None else (label, self.reference), self.probed)

    def __str__(self) -> str:
        return "\n".join([self._heading(), "", self.table(), "", *self._conclusions()])

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table: the heading, then a row per trial."""
        heading = ("scale", "loss", "off by", "skipped", "outcome", *(["probe"] if self.probed else []))
        return [heading, *self._rows()]

    def table(self) -> str:
        """Return the rows as an aligned table."""
        return aligned(self.rows(), right=range(4))

    def _heading(self) -> str:
        if self.reference is None:
            return "no run reached a finite loss"
        which = "" if self.measured else ", the best of these runs"
        return f"reference loss {self.reference:.4f}{which}; ok is within {self.tolerance:g} of it"

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for trial, outcome in zip(self.trials, self.outcomes, strict=True):
            off = self.difference(trial)
            yield (
                power(trial.scale),
                "" if trial.loss is None else f"{trial.loss:.4f}",
                f"{off:+.4f}" if math.isfinite(off) else "",
                "" if trial.skipped is None else str(trial.skipped),
                outcome,
                *(["safe" if trial.scale in self.probed else ""] if self.probed else []),
            )

    def _conclusions(self) -> Iterator[str]:
        yield f"ok: {self.window}" if self.window else "no scale is ok"
        if self.probed:
            wrong = ", ".join(power(trial.scale) for trial in self.unsafe)
            inside = sum(trial.scale in self.probed for trial in self.trials)
            yield f"the probe's window: {self.probed}; of {inside} scales in it, not ok: {wrong or 'none'}"
        for trial in self.trials:
            if trial.failure:
                yield f"at {power(trial.scale)}: {trial.failure}"


def sweep(
    train: Callable[[float], Any],
    scales: Iterable[float] | None = None,
    *,
    probe: Probe | None = None,
    reference: float | Callable[[], Any] | None = None,
    tolerance: float = 0.01,
    progress: Progress = True,
) -> Sweep:
    """Train briefly at each of several static loss scales, and report which of them reach the loss of float32.

    >>> def train(scale):  # a model whose gradients underflow below 2**4 and overflow above 2**20
    ...     return 1.0 if 2.0**4 <= scale <= 2.0**20 else 1.5
    >>> sweep(train, reference=1.0, progress=False).window
    Window(2^4 .. 2^20)

    Args:
        train: ``train(scale)`` trains a fresh model, each time from the same start and on the same batches, with
            ``LossScale.fixed(scale)``. It returns the final loss (a number, or a scalar of any framework), ``(loss,
            skipped steps)``, ``(loss, skipped steps, steps)``, or the loss and an object from which `polyamp.health`
            reads the steps: ``(loss, optimizer)``, in JAX ``(loss, opt_state)``.
        scales: positive numbers, usually powers of two; None is 2^-4 .. 2^28 in steps of 4 powers.
        probe: the result of `polyamp.probe` for the same model; its window is compared, and shaded in the plot.
        reference: the loss of the same training in float32, or a function without arguments that trains it; None is
            the best loss of the sweep.
        tolerance: how far from the reference a loss is still ok, in the loss's own unit.
        progress: True shows a bar on standard error (lines if that is not a terminal), False nothing; or a function
            that is called with ``(runs done, runs in all, text)``.

    Raises:
        InvalidTypeError: ``train`` is not callable, or returns no loss.
        InvalidValueError: there are no scales, or one is not a positive finite number.

    Other errors of ``train`` propagate; polyamp's own errors, such as `LossScaleError`, end only that run.
    """
    chosen = _checked_scales(SCALES if scales is None else scales)
    _check_arguments(train, probe, tolerance)
    with progressing(progress, len(chosen) + callable(reference), "sweep") as done:
        goal = _reference(reference, done)
        trials = tuple(_trial(train, scale, done) for scale in chosen)
    best = min((trial.loss for trial in trials if trial.is_finite and trial.loss is not None), default=None)
    return Sweep(trials, best if goal is None else goal, tolerance, probe, measured=goal is not None)


def _reference(reference: Any, done: Callable[[str], None]) -> float | None:
    if reference is None:
        return None
    loss, *_ = _read(reference() if callable(reference) else reference, where="sweep(reference=)")
    if not math.isfinite(loss):
        raise InvalidValueError(
            "the reference loss is not finite",
            where="sweep(reference=)",
            found=loss,
            allowed="a finite number",
            fix="find out why float32 diverges before looking at scales",
        )
    if callable(reference):
        done(f"reference: loss {loss:.4f}")
    return loss


def _trial(train: Callable[[float], Any], scale: float, done: Callable[[str], None]) -> Trial:
    try:
        loss, skipped, steps = _read(train(scale), where="sweep(train)")
        trial = Trial(scale, loss, skipped, steps=steps)
    except _Unreadable:
        raise
    except PolyampError as error:
        trial = Trial(scale, None, failure=str(error))
    done(str(trial))
    return trial


class _Unreadable(InvalidTypeError):
    """Raised if the result of ``train`` is not a loss: a fault of the call, which no scale changes."""


def _read(given: Any, *, where: str) -> tuple[float, int | None, int | None]:
    """Return the loss, the skipped steps and all steps from the result of a training function."""
    several = (isinstance(given, tuple | list) and len(given) == 2) or (isinstance(given, tuple) and len(given) == 3)
    parts = tuple(given) if several else (given,)
    loss, skipped, steps = (*parts, None, None)[:3]
    try:
        number = as_number(loss)
        if len(parts) == 2 and not hasattr(skipped, "__int__") and registry.adapter_within(skipped) is not None:
            counted = health(skipped)
            return number, counted.skipped, counted.steps
        return number, _count(skipped), _count(steps)
    except (TypeError, ValueError, OverflowError) as error:
        raise _Unreadable(
            "not a loss",
            where=where,
            found=shown(given),
            allowed="a number, a scalar array, (loss, skipped steps[, steps]) or (loss, optimizer)",
            fix="return the final loss, averaged to one number",
        ) from error


def _count(given: Any) -> int | None:
    return None if given is None else int(given)


def _checked_scales(scales: Iterable[float]) -> Sequence[float]:
    chosen = sorted(set(scales))
    wrong = [scale for scale in chosen if isinstance(scale, bool) or not 0 < scale <= sys.float_info.max]
    if wrong or not chosen:
        raise InvalidValueError(
            "a sweep tries positive, finite scales",
            where="sweep(scales=)",
            found=", ".join(map(repr, wrong)) or "none",
            allowed="at least one number greater than 0",
            fix="write, for example, [2.0**n for n in range(0, 25, 4)]",
        )
    return [float(scale) for scale in chosen]


def _check_arguments(train: object, probe: object, tolerance: object) -> None:
    checks = [
        ("train", train, callable(train), "a function of the scale"),
        ("probe", probe, probe is None or isinstance(probe, Probe), "what polyamp.probe returned"),
        ("tolerance", tolerance, isinstance(tolerance, int | float) and tolerance >= 0, "a number, 0 or greater"),
    ]
    check_arguments("sweep", checks, InvalidTypeError)


def _limits(window: Window | None) -> dict[str, float] | None:
    return None if window is None else window._asdict()


def _number(loss: float | None) -> float | str | None:
    """Return a loss for JSON, which has no inf and NaN: those become text."""
    return loss if loss is None or math.isfinite(loss) else str(loss)
