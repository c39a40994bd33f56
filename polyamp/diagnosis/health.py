"""How training with a loss scale is going, from the counters that every step keeps on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from polyamp import registry
from polyamp.errors import InvalidTypeError
from polyamp.layout import finite, power
from polyamp.loss_scale import LossScale, LossScaleState

if TYPE_CHECKING:
    from polyamp.diagnosis.probe import Probe

State = Literal["ok", "calibrating", "spiral", "underflowing", "frozen"]

SPIRAL = 3
"""Skipped steps in a row, beyond those that one growth explains, that are no accident.

A scale that grew once too often comes back by as many skips as undo that growth: with the usual settings, one. Batches
that overflow by themselves are rare where a scale has been good for thousands of steps; three more of them in a row
are not chance.
"""

LOWEST_USEFUL = 1.0
"""Smaller scales move gradients towards zero instead of away from it, and float16 flushes those below 2**-25."""

FINDINGS = {
    "ok": "Nothing to do: skipped steps are those in which the scale tries how far it can go.",
    "calibrating": "The scale is still being found: steps that are skipped until it first grows are normal.",
    "spiral": "Training stands still: polyamp.diagnose(step, ...) names the first tensor that is not finite, and says "
    "whether the scale, a layer or the forward pass is to blame.",
    "underflowing": "Gradients are lost at this scale: polyamp.probe(step, ...) says which scale they need, and which "
    "tensor keeps it from being larger.",
    "frozen at min": "The scale cannot fall any further: polyamp.diagnose(step, ...) says what overflows; where the "
    "loss is finite, set a smaller LossScale(min=...).",
    "frozen at max": "Nothing overflows at the largest scale that is allowed, and nothing is lost by staying there.",
}
"""What to do, for each state."""


@dataclass(frozen=True)
class Health:
    """What `polyamp.health` gives: counters of the loss scale, and what they mean. Prints as one line.

    >>> state = LossScaleState(2.0**15, 1310, 1, 0, 9, 10240, 4, 7, 8930, 2.0**16)
    >>> print(Health(LossScale(), state))
    steps 10,240  skipped 9 (7 calibrating, 2 periodic)  scale 2^15  last growth 1,310 steps ago  margin +1.0 bits  ok

    Args:
        settings: of the loss scale.
        counters: its state, as Python numbers.
        probe: what `polyamp.probe` gave for this model: the scale is then measured against its window.
    """

    settings: LossScale
    counters: LossScaleState
    probe: Probe | None = None

    @property
    def steps(self) -> int:
        """Steps in all, skipped ones too."""
        return int(self.counters.steps)

    @property
    def skipped(self) -> int:
        """Skipped steps in all: `calibrating`, `periodic` and `unexpected` ones."""
        return int(self.counters.skipped)

    @property
    def calibrating(self) -> int:
        """Steps skipped before the scale first grew, while it came down from its first value: expected.

        0 for a scale that never moves, which finds nothing by skipping.
        """
        return int(self.counters.calibrating) if self.settings.dynamic else 0

    @property
    def periodic(self) -> int:
        """Steps skipped to take back a growth, one for each at most: expected, every few intervals."""
        return min(int(self.counters.growths), self.skipped - self.calibrating)

    @property
    def unexpected(self) -> int:
        """The other skipped steps: their gradients were larger than those of the steps before."""
        return self.skipped - self.calibrating - self.periodic

    @property
    def skipped_in_a_row(self) -> int:
        """Steps skipped since the last one that was applied."""
        return int(self.counters.skipped_in_a_row)

    @property
    def scale(self) -> float:
        """What the next loss is multiplied by."""
        return float(self.counters.scale)

    @property
    def last_growth(self) -> int | None:
        """How many steps ago the scale grew; None where it never did."""
        return self.steps - int(self.counters.grown_at) if self.counters.growths else None

    @property
    def margin(self) -> float | None:
        """By how many powers of two the scale is below what is too much: the upper edge of the probed window, else
        the scale that overflowed last. None where neither is known."""
        window = self.probe.window if self.probe is not None else None
        too_much = float(self.counters.overflow_scale) if window is None else window.high
        return math.log2(too_much / self.scale) if too_much > 0 else None

    @property
    def state(self) -> State:
        """The most serious of these that holds:

        - ``"spiral"``: steps are skipped in a row, more than a growth, or the search for the first scale, explains.
        - ``"frozen"`` at the smallest scale: it cannot back off any more.
        - ``"underflowing"``: the scale is too small to keep gradients: below the probed window, else below 1.
        - ``"calibrating"``: the scale has not grown yet; it may be coming down from its first value.
        - ``"frozen"`` at the largest scale: it cannot grow any more.
        - ``"ok"``.
        """
        return self._judged[0]

    @property
    def why(self) -> str:
        """What says so: numbers."""
        return self._judged[1]

    @property
    def alarming(self) -> bool:
        """Whether training is losing steps or gradients: spiral, underflowing, or frozen at the smallest scale."""
        return self.state in ("spiral", "underflowing") or self._frozen_at_min

    @property
    def finding(self) -> str:
        """What to do, in a sentence.

        >>> Health(LossScale(), LossScale().initial_state()).finding
        'The scale is still being found: steps that are skipped until it first grows are normal.'
        """
        limit = "min" if self._frozen_at_min else "max"
        return FINDINGS[f"frozen at {limit}" if self.state == "frozen" else self.state]

    def as_dict(self) -> dict[str, Any]:
        """As JSON values.

        >>> Health(LossScale.fixed(8), LossScale.fixed(8).initial_state()).as_dict()["state"]
        'ok'
        """
        names = ("state", "why", "finding", "alarming", "steps", "skipped", "calibrating", "periodic", "unexpected")
        others = ("skipped_in_a_row", "scale", "last_growth")
        return {**{name: getattr(self, name) for name in (*names, *others)}, "margin": finite(self.margin)}

    def __str__(self) -> str:
        parts = [f"steps {self.steps:,}", f"skipped {self._skips}", f"scale {power(self.scale)}"]
        if self.last_growth is not None:
            parts.append(f"last growth {self.last_growth:,} steps ago")
        if self.margin is not None:
            parts.append(f"margin {self.margin:+.1f} bits")
        said = self.state if self.state in ("ok", "calibrating") else f"{self.state}: {self.why}"
        return "  ".join([*parts, said])

    @property
    def _skips(self) -> str:
        kinds = ("calibrating", "periodic", "unexpected")
        parts = [f"{getattr(self, kind):,} {kind}" for kind in kinds if getattr(self, kind)]
        return f"{self.skipped:,} ({', '.join(parts)})" if parts else f"{self.skipped:,}"

    @property
    def _judged(self) -> tuple[State, str]:
        scale, settings = power(self.scale), self.settings
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
        """Whether the scale is still being found; one that starts at its maximum never grows."""
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
        """Skips that take back one growth."""
        settings = self.settings
        halvings = math.log(settings.growth) / -math.log(settings.backoff)
        return settings.hysteresis - 1 + math.ceil(halvings - 1e-6) if settings.dynamic else 1

    @property
    def _frozen_at_min(self) -> bool:
        """A scale that starts there, and overflowed never, is not stuck."""
        return self.settings.dynamic and self.scale <= self.settings.min and self.skipped > 0

    @property
    def _lowest(self) -> float:
        window = self.probe.window if self.probe is not None else None
        return LOWEST_USEFUL if window is None else window.low


def health(holder: Any, probe: Probe | None = None) -> Health:
    """How training with a loss scale is going: steps, skips and why, the scale, and whether to worry.

    The counters are kept on the device, at every step. Reading them waits for it: once in a while, and not each step
    (see `HealthMonitor`).

    >>> import torch
    >>> from polyamp import wrap_optimizer
    >>> opt = wrap_optimizer(torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1), "mixed_float16")
    >>> print(health(opt))
    steps 0  skipped 0  scale 2^16  calibrating

    Args:
        holder: a wrapped optimizer, a loss scaler of polyamp, a Keras model compiled with a wrapped optimizer, or in
            JAX a pytree that has the state of one wrapped optimizer.
        probe: what `polyamp.probe` gave for this model; its window then says what is too small and too much.

    Raises:
        InvalidTypeError: ``holder`` has no loss scale, or ``probe`` is none.
        UsageError: JAX: a pytree with no such state, or several.
    """
    check_probe(probe, where="health(probe=)")
    adapter = registry.adapter_within(holder)
    if adapter is None:
        raise registry.no_adapter(holder, where="health(holder)")
    settings, counters = registry.verb(adapter, "loss_scale_of")(holder)
    return Health(settings, counters, probe)


def check_probe(probe: object, *, where: str) -> None:
    """Refuse what is neither None nor a probe.

    >>> check_probe(None, where="health(probe=)")

    Raises:
        InvalidTypeError: by what it lacks, a ``window``.
    """
    if probe is not None and not hasattr(probe, "window"):
        raise InvalidTypeError(
            "this is no probe",
            where=where,
            found=f"{probe!r} ({type(probe).__name__})",
            allowed="a polyamp.Probe, or None",
            fix="give what polyamp.probe(step, ...) returned",
        )
