"""The health of training with a loss scale, from the counters that every step keeps on the device.

For example, "skipped 9 (7 calibrating, 2 periodic)" is healthy: seven steps were skipped while the scale came down from
its first value, and two after a growth that was too much. Other skipped steps count as unexpected. `watch` reads the
counters during training, and lets `polyamp.diagnose` explain a run of skipped steps.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from polyamp.adapters import adapter_for, adapter_within, check_backend
from polyamp.diagnosis.diagnose import Verdict, diagnose
from polyamp.diagnosis.probe import Probe
from polyamp.errors import (
    InvalidTypeError,
    PolyampError,
    check_arguments,
    check_callable,
    check_count,
    refuses_unreadable,
    unknown_options,
)
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy
from polyamp.report import Report, finite, power
from polyamp.settings import LossScale, LossScaleState
from polyamp.skips import report_verdict

Step = TypeVar("Step", bound=Callable[..., Any])
State = Literal["ok", "calibrating", "spiral", "underflowing", "frozen"]

SPIRAL = 3
"""Skipped steps in a row, beyond those that one growth explains, that count as a spiral.

A scale that grew once too often comes back after as many skips as undo that growth: with the usual settings, one. Once
a scale has been good for thousands of steps, batches that overflow on their own are rare. Three more in a row are not
an accident.
"""

LOWEST_USEFUL = 1.0
"""Smaller scales move gradients towards zero instead of away from it, and float16 flushes those below 2**-25."""

FINDINGS = {
    "ok": "Nothing to do: skipped steps are those in which the scale tries how far it can go.",
    "calibrating": "The scale is still being adjusted: skipped steps are normal until it grows for the first time.",
    "spiral": "Training stands still: polyamp.diagnose(step, ...) names the first tensor that is not finite, and tells "
    "whether the scale, a layer or the forward pass is to blame.",
    "underflowing": "Gradients are lost at this scale: polyamp.probe(step, ...) reports which scale they need, and "
    "which tensor keeps it from being larger.",
    "frozen at min": "The scale cannot fall any further: polyamp.diagnose(step, ...) names what overflows; if the "
    "loss is finite, set a smaller LossScale(min=...).",
    "frozen at max": "Nothing overflows at the largest scale that is allowed, and nothing is lost by staying there.",
}
"""What to do in each state."""


@dataclass(frozen=True)
class Health(Report):
    """The result of `polyamp.health`: counters of the loss scale and their meaning. Prints as one line."""

    settings: LossScale  # the settings of the loss scale
    counters: LossScaleState  # its state, as Python numbers
    probe: Probe | None = None  # of this model; the scale is then compared with its window

    @property
    def steps(self) -> int:
        """Return the number of all steps, including skipped ones."""
        return int(self.counters.steps)

    @property
    def skipped(self) -> int:
        """Return the number of all skipped steps: `calibrating`, `periodic` and `unexpected` ones."""
        return int(self.counters.skipped)

    @property
    def calibrating(self) -> int:
        """Return the number of steps skipped before the scale first grew, to bring down a high first scale."""
        return int(self.counters.calibrating) if self.settings.dynamic else 0

    @property
    def periodic(self) -> int:
        """Return the number of steps skipped to undo a growth, at most one per growth. They are expected."""
        return min(int(self.counters.growths), self.skipped - self.calibrating)

    @property
    def unexpected(self) -> int:
        """Return the number of steps skipped for another reason, such as suddenly larger gradients."""
        return self.skipped - self.calibrating - self.periodic

    @property
    def skipped_in_a_row(self) -> int:
        """Return the number of steps skipped since the last applied one."""
        return int(self.counters.skipped_in_a_row)

    @property
    def scale(self) -> float:
        """Return the loss scale for the next loss."""
        return float(self.counters.scale)

    @property
    def last_growth(self) -> int | None:
        """Return how many steps ago the scale grew; None if it never did."""
        return self.steps - int(self.counters.grown_at) if self.counters.growths else None

    @property
    def margin(self) -> float | None:
        """Return by how many powers of two the scale is below the smallest known to be too large, or None."""
        # That is the upper edge of the probed window, else the scale that overflowed last.
        window = self.probe.window if self.probe is not None else None
        too_much = float(self.counters.overflow_scale) if window is None else window.high
        return math.log2(too_much / self.scale) if too_much > 0 else None

    @property
    def state(self) -> State:
        """Return the most serious state that applies, in the order of `_judged`."""
        return self._judged[0]

    @property
    def why(self) -> str:
        """Return the numbers behind `state`."""
        return self._judged[1]

    @property
    def alarming(self) -> bool:
        """Return whether training loses steps or gradients: spiral, underflowing, or frozen at the smallest scale."""
        return self.state in ("spiral", "underflowing") or self._frozen_at_min

    @property
    def finding(self) -> str:
        """Return what to do, as a sentence."""
        limit = "min" if self._frozen_at_min else "max"
        return FINDINGS[f"frozen at {limit}" if self.state == "frozen" else self.state]

    def as_dict(self) -> dict[str, Any]:
        """Return the health as JSON values, such as a logger takes."""
        names = ("state", "why", "finding", "alarming", "steps", "skipped", "calibrating", "periodic", "unexpected")
        others = ("skipped_in_a_row", "scale", "last_growth")
        return {**{name: getattr(self, name) for name in (*names, *others)}, "margin": finite(self.margin)}

    def heading(self) -> str:
        """Return the counters and the state as one line."""
        parts = [f"steps {self.steps:,}", f"skipped {self._skips}", f"scale {power(self.scale)}"]
        if self.last_growth is not None:
            parts.append(f"last growth {self.last_growth:,} steps ago")
        if self.margin is not None:
            parts.append(f"margin {self.margin:+.1f} bits")
        verdict = self.state if self.state in ("ok", "calibrating") else f"{self.state}: {self.why}"
        verdict = verdict if self.settings.check else "not checked"
        return "  ".join([*parts, verdict])

    @property
    def _skips(self) -> str:
        kinds = ("calibrating", "periodic", "unexpected")
        parts = [f"{getattr(self, kind):,} {kind}" for kind in kinds if getattr(self, kind)]
        return f"{self.skipped:,} ({', '.join(parts)})" if parts else f"{self.skipped:,}"

    @property
    def _judged(self) -> tuple[State, str]:
        scale, settings = power(self.scale), self.settings
        if not settings.check:
            return "ok", "not checked: LossScale.none() tests no gradients"
        if self._spirals:
            return "spiral", f"{self.skipped_in_a_row:,} steps skipped in a row"
        if self._frozen_at_min:
            return "frozen", f"the scale is at its minimum, {power(settings.min)}"
        if self.scale < self._lowest:
            return "underflowing", f"the scale, {scale}, is below {power(self._lowest)}"
        if self._is_new:
            return (
                "calibrating",
                f"the scale has not grown yet, which takes {settings.interval:,} steps without overflow",
            )
        if settings.dynamic and self.scale >= settings.max:
            return "frozen", f"the scale is at its maximum, {power(settings.max)}"
        return "ok", f"{self.unexpected:,} of {self.steps:,} steps skipped unexpectedly"

    @property
    def _is_new(self) -> bool:
        """Return whether no step was made yet, or the scale has never grown although it is below its maximum."""
        settings = self.settings
        unstepped = self.steps == 0
        return settings.dynamic and (unstepped or (not self.counters.growths and self.scale < settings.max))

    @property
    def _spirals(self) -> bool:
        most, limit = self.skipped_in_a_row, self.settings.max_skips
        if limit is not None and most >= limit:
            return True
        low_enough = not self._is_new or self.scale < min(LOWEST_USEFUL, self.settings.init)
        return low_enough and most >= SPIRAL + self._undoing

    @property
    def _undoing(self) -> int:
        """Return the number of skips that undo one growth."""
        settings = self.settings
        halvings = math.log(settings.growth) / -math.log(settings.backoff)
        return settings.hysteresis - 1 + math.ceil(halvings - 1e-6) if settings.dynamic else 1

    @property
    def _frozen_at_min(self) -> bool:
        """Return whether the scale is stuck at its minimum. One that starts there and never overflowed is not stuck."""
        return self.settings.dynamic and self.scale <= self.settings.min and self.skipped > 0

    @property
    def _lowest(self) -> float:
        window = self.probe.window if self.probe is not None else None
        return LOWEST_USEFUL if window is None else window.low


@refuses_unreadable
def health(holder: Any, probe: Probe | None = None) -> Health:
    """Report how training with a loss scale is going: steps, skips and why, the scale, and whether to worry.

    The counters are kept on the device and updated at every step. Reading them waits for the device, so read them once
    in a while, not at each step. A logger takes ``health(holder).as_dict()``.

    >>> import torch
    >>> from polyamp import wrap_optimizer
    >>> opt = wrap_optimizer(torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1), "mixed_float16")
    >>> print(health(opt))
    steps 0  skipped 0  scale 2^16  calibrating

    Args:
        holder: a wrapped optimizer, a loss scaler of polyamp, a Keras model compiled with a wrapped optimizer, or in
            JAX a pytree that contains the state of one wrapped optimizer.
        probe: the result of `polyamp.probe` for this model; its window then decides which scales are too small or too
            large.

    Raises:
        InvalidTypeError: ``holder`` has no loss scale, or ``probe`` is not a probe.
        UsageError: in JAX, the pytree has no such state, or several.
    """
    fits = probe is None or hasattr(probe, "window")
    check_arguments("health", [("probe", probe, fits, "the result of polyamp.probe, or None")], InvalidTypeError)
    adapter = adapter_for(None, holder, where="health(holder)")
    settings, counters = adapter.loss_scale_of(holder)
    return Health(settings, counters, probe)


@dataclass
class Explainer:
    """A callable that delivers a verdict on a run of skipped steps, once per run."""

    diagnose: Callable[..., Verdict]
    on_verdict: Callable[[Verdict], object] = report_verdict
    explained: int | None = None  # the step before the last run that was explained

    def __call__(self, found: Health, *args: Any, **kwargs: Any) -> None:
        """Explain the run of skips before a step with these arguments, unless that was done already."""
        explained, self.explained = self.explained, found.steps - found.skipped_in_a_row
        if explained == self.explained:
            return
        try:
            verdict = self.diagnose(*args, **kwargs)
        except PolyampError as error:
            report_verdict(error)
        else:
            self.on_verdict(verdict)


@refuses_unreadable
def watch(
    step: Step,
    holder: Any = None,
    *,
    after: int = 4,
    on_verdict: Callable[[Verdict], object] | None = None,
    policy: Policy | str | None = None,
    scale: float | None = None,
    backend: str | None = None,
    **mistaken: Any,
) -> Step:
    """Wrap a training step so that it is diagnosed automatically if several steps in a row are skipped.

    At every ``after``-th call the loss scale's counters are read, which waits for the device. If at least ``after``
    steps in a row were skipped, `polyamp.diagnose` examines the step with that call's arguments before it runs, once
    per run of skips. The step and its result do not change.

    >>> import torch
    >>> from polyamp import wrap_optimizer
    >>> weight = torch.ones(2, requires_grad=True)
    >>> opt = wrap_optimizer(torch.optim.SGD([weight], lr=0.1), "mixed_float16")
    >>> def step(x):
    ...     opt.zero_grad()
    ...     opt.backward((weight * x).sum())
    ...     opt.step()
    >>> step = watch(step, opt)
    >>> step(torch.ones(2))

    Args:
        step: a training step, as `polyamp.diagnose` takes it.
        holder: the object that `polyamp.health` takes: the wrapped optimizer or the loss scaler. In JAX, where states
            are values, it may be the optimizer, its state or None: the state is searched for in the step's arguments,
            and then in its last result; donated buffers are read while they still exist.
        after: skipped steps in a row that trigger a diagnosis.
        on_verdict: receives the verdict; None issues it as a `PolyampWarning`.
        policy, scale, backend: passed to `polyamp.diagnose`.
        **mistaken: other options: refused.

    Raises:
        InvalidTypeError: ``step`` or ``on_verdict`` is not callable, or ``after`` is not an integer.
        InvalidValueError: ``after`` is less than 1, or the policy is unknown.
        UnsupportedError: an option does not exist.
        PolyampError: at the first check, as `polyamp.health`, if nothing holds a loss scale.
    """
    check_callable(step, where="watch(step)", allowed="a function", fix="give the training step itself")
    tell = report_verdict if on_verdict is None else on_verdict
    check_callable(tell, where="watch(on_verdict=)", allowed="a function of a Verdict", fix="give print, for example")
    check_count("after", after, where="watch(after=)")
    if mistaken:
        options = ("after", "on_verdict", "policy", "scale", "backend")
        raise unknown_options([*mistaken], options, where="watch(step, holder)")
    check_backend(backend)
    chosen = None if policy is None else make_policy(policy)
    explain = Explainer(functools.partial(diagnose, step, policy=chosen, scale=scale, backend=backend), tell)
    is_value = holder is None or hasattr(adapter_within(holder), "holds_loss_scale")
    calls, returned = itertools.count(1), None

    @functools.wraps(step)
    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal returned
        if next(calls) % after == 0:
            places = ((args, kwargs), returned, holder)
            try:
                found = health(next(filter(_holds_scale, places), places) if is_value else holder)
            except PolyampError as error:
                error.add_note("in polyamp.watch: pass the optimizer. In JAX, let the step take and return its state")
                raise
            if found.skipped_in_a_row >= after:
                explain(found, *args, **kwargs)
        result = step(*args, **kwargs)
        returned = result if is_value else None
        return result

    return watched  # type: ignore[return-value]


def _holds_scale(tree: Any) -> bool:
    adapter = adapter_within(tree)
    return adapter is not None and hasattr(adapter, "holds_loss_scale") and bool(adapter.holds_loss_scale(tree))
