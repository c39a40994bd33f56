"""The verdict on a skipped step: its first tensor that is not finite, in the order of computation, decides.

For example, if a matmul's output in the forward pass is the first, the forward pass overflows and no loss scale helps.
If an activation gradient is the first, and it jumped by `AMPLIFIES` or more powers of two, that layer is to blame;
without such a jump, the loss scale is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from polyamp.diagnosis.probe import Probe, written
from polyamp.diagnosis.recording import ACTIVATION, GRADIENT, Observation, Recording
from polyamp.diagnosis.rounding import Rounding, rounding, source_of
from polyamp.formats import format_of
from polyamp.layout import JsonReport, aligned, power

AMPLIFIES = 4.0
"""Powers of two that a gradient has to grow in one operation for that operation to be called amplifying.

From layer to layer, the largest gradient changes by a factor of a few (initialisation schemes keep it level). A factor
of 16 or more in one operation is caused by that operation, not by the loss scale.
"""

_BEFORE, _AFTER = 5, 2  # tensors to show around the first bad one

VerdictKind = Literal["finite", "rounding", "scale", "layer", "forward", "model"]


@dataclass(frozen=True)
class Verdict(JsonReport):
    """The result of `polyamp.diagnose`. Prints the first tensor that is not finite, its neighbours, and what to do."""

    recording: Recording  # one step under the policy, with scaled gradients
    wide: Recording  # the same step computed in float32
    probe: Probe  # what that run shows about the loss scale
    # rules that were tried, before the policy's own; see `polyamp.diagnose`
    tried: Mapping[str, str] = field(default_factory=dict)
    is_cured: bool = False  # whether the step was finite with them

    @cached_property
    def first(self) -> Observation | None:
        """Return the first tensor that is not finite; None if all are finite."""
        return next((one for one in self.recording.observations if not one.spread.is_finite), None)

    @cached_property
    def kind(self) -> VerdictKind:
        """Return the kind of fault."""
        # One of: none ("finite"), values that rounding changes, a scale that is too high, a layer that amplifies
        # gradients, a forward pass that overflows, or a model that is not finite in float32 either.
        first = self.first
        if first is None:
            return "rounding" if self.rounding else "finite"
        if first.kind == ACTIVATION:
            return "model" if self.probe.broken and self.probe.broken.kind == ACTIVATION else "forward"
        if self.probe.broken:
            return "model"
        return "layer" if self.amplification >= AMPLIFIES else "scale"

    @cached_property
    def rounding(self) -> Rounding | None:
        """Return how 16 bits change the step's values; None if they agree."""
        return rounding(self.recording, self.wide)

    @cached_property
    def amplification(self) -> float:
        """Return by how many powers of two the first gradient beyond the format exceeds the 16-bit one before it."""
        # Both are compared in float32. 0 if it is the first of all 16-bit gradients, or a parameter's: a parameter's
        # gradient is a sum over the batch, which in any layer is larger than its terms.
        after, before = (self._in_float32(one) for one in self._jump)
        if not (after and before and after.spread.largest and before.spread.largest):
            return 0.0
        return math.log2(after.spread.largest / before.spread.largest)

    @cached_property
    def _jump(self) -> tuple[Observation | None, Observation | None]:
        """Return the first activation gradient beyond the format, and the last 16-bit one before it."""
        # The first one is in 16 bits itself, or comes after one that is.
        before: Observation | None = None
        limit = format_of(self.probe.format).max
        for one in self.recording.observations[: self._place + 1]:
            if one.kind != GRADIENT or not (one.is_low or before):
                continue
            if not one.spread.is_finite or one.spread.largest > limit:
                return one, before
            if one.is_low and one.spread.largest:
                before = one
        return None, before

    @property
    def _place(self) -> int:
        return next((place for place, one in enumerate(self.recording.observations) if one is self.first), 0)

    def _in_float32(self, wanted: Observation | None) -> Observation | None:
        """Return the same tensor in the float32 run: the one of the same kind, place and turn at that place."""
        if wanted is None:
            return None
        earlier = itertools.takewhile(lambda one: one is not wanted, self.recording.observations)
        turn = sum(_key(one) == _key(wanted) for one in earlier)
        same = (one for one in self.wide.observations if _key(one) == _key(wanted))
        return next(itertools.islice(same, turn, None), None)

    @property
    def rules(self) -> dict[str, str]:
        """Return rules that keep the cause in float32, to paste into a policy; empty if no rule helps."""
        return dict(self.tried) if self.is_cured else self.culprits

    @cached_property
    def culprits(self) -> dict[str, str]:
        """Return rules for only the first tensor that is not finite, or that differs."""
        if self.rounding and self.kind == "rounding":
            return {source_of(self.recording, self.rounding.first).place: "full"}
        if self.kind == "forward":
            return self.probe.rules or {self._culprit.place: "full"}
        if self.kind == "layer":
            return {self._culprit.where or self._culprit.place: "full"}
        return {}

    @property
    def _culprit(self) -> Observation:
        """Return the cause: the gradient that jumps, or the first bad tensor of the forward pass."""
        # If that tensor is in float32, the cause is the last 16-bit tensor before it.
        found = self._jump[0] if self.kind == "layer" else self.first
        if found is None:
            raise LookupError("every tensor is finite")
        if found.is_low or self.kind == "layer":
            return found
        earlier = self.recording.observations[: self._place]
        return next((one for one in reversed(earlier) if one.is_low), found)

    @property
    def advice(self) -> str:
        """Return the verdict in a sentence or two, with what to do."""
        return _ADVICE[self.kind](self)

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict as JSON values."""
        window = self.probe.window
        return {
            "verdict": self.kind,
            "advice": self.advice,
            "rules": self.rules,
            "rules_suffice": self.is_cured,
            "scale": self.recording.scale,
            "window": None if window is None else {"low": window.low, "high": window.high, "empty": window.is_empty},
            "first": None if self.first is None else self.first.as_dict(),
            "amplification": self.amplification,
            "rounding": self.rounding and self.rounding.as_dict(),
            "tensors": [one.as_dict() for one in self.recording.observations],
        }

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self.recording.framework}, {self.recording.policy}, loss scale {power(self.recording.scale)}: "
                f"{_counted(self.first)}",
                "",
                self._table(),
                "",
                f"verdict: {self.advice}",
            ]
        )

    def _table(self) -> str:
        place = self._place
        named = list(zip(self.recording.observations, self.recording.names, strict=True))
        shown = named[max(0, place - _BEFORE) : place + 1 + _AFTER]
        if self.first is None:
            low = [pair for pair in named if pair[0].is_low]
            shown = sorted(low, key=lambda pair: pair[0].spread.headroom(pair[0].format))[:_BEFORE]
        rows = [_row(one, name, one is self.first) for one, name in shown]
        return aligned([("kind", "tensor", "format", "amax", "headroom", ""), *rows], right={3, 4})


def _key(one: Observation) -> tuple[str, str]:
    return one.kind, one.place


def _row(one: Observation, name: str, is_first: bool) -> tuple[str, ...]:
    spread = one.spread
    largest = f"{spread.largest:.3g}" if spread.is_finite else "inf" if spread.inf else "nan"
    headroom = f"{spread.headroom(one.format):+.1f} bits" if spread.is_finite else ""
    return one.kind, name, one.format, largest, headroom, "<- the first" if is_first else ""


def _counted(first: Observation | None) -> str:
    if first is None:
        return "every tensor is finite"
    spread = first.spread
    counts = [f"{count} {word}" for count, word in ((spread.inf, "inf"), (spread.nan, "NaN")) if count]
    return (
        f"the first that is not finite is the {first.kind} {first.place}, {' and '.join(counts)} of {spread.elements}"
    )


def _finite(verdict: Verdict) -> str:
    return (
        f"FINITE: nothing overflows at a loss scale of {power(verdict.recording.scale)}; a step like this is applied."
    )


def _rounding(verdict: Verdict) -> str:
    return (
        f"ROUNDING: nothing overflows, but {verdict.rounding}. No loss scale helps; keep it float32: "
        f"rules={verdict.rules!r}{_tried(verdict)}."
    )


def _scale(verdict: Verdict) -> str:
    scale, window = verdict.recording.scale, verdict.probe.window
    if window is None or window.is_empty:
        return f"SCALE of {power(scale)} is too high, and no scale suits: {' '.join(verdict.probe.conclusions())}"
    halvings = max(1, math.ceil(math.log2(scale / window.high) - verdict.probe.margin))
    steps = "step" if halvings == 1 else "steps"
    return (
        f"SCALE of {power(scale)} is too high, which is normal while it is looked for: a dynamic scale passes after "
        f"about {halvings} skipped {steps}. The safe window is {window}; start with "
        f"{written(verdict.probe.recommended)}."
    )


def _layer(verdict: Verdict) -> str:
    culprit, window = verdict._culprit, verdict.probe.window
    holds = window is not None and not window.is_empty and verdict.recording.scale > window.high
    lower = f" A loss scale within {window} helps too." if holds else ""
    return (
        f"LAYER {culprit.where or culprit.place} amplifies gradients by 2^{verdict.amplification:.1f} in "
        f"{culprit.name}; keep it float32: rules={verdict.rules!r}{_tried(verdict)}.{lower}"
    )


def _forward(verdict: Verdict) -> str:
    culprit = verdict._culprit
    wide = verdict._in_float32(culprit)
    largest = f" (float32 has {wide.spread.largest:.3g}, {culprit.format} ends at {_end(culprit)})" if wide else ""
    return (
        f"FORWARD pass overflows in {culprit.place}{largest}: lowering the loss scale can never help; keep it float32: "
        f"rules={verdict.rules!r}{_tried(verdict)}."
    )


def _tried(verdict: Verdict) -> str:
    if verdict.is_cured:
        return f" (tried: the step is then {'as in float32' if verdict.kind == 'rounding' else 'finite'})"
    if not verdict.tried:
        return ""
    if verdict.kind == "rounding":
        return " (tried: not enough alone, since what is rounded before it differs too)"
    return " (tried: not enough alone, since 16-bit layers below take what is too large)"


def _end(one: Observation) -> str:
    return f"{format_of(one.format).max:.5g}"


def _model(verdict: Verdict) -> str:
    broken = verdict.probe.broken
    place = "" if broken is None else f" in the {broken.kind} {broken.place}"
    return f"MODEL is not finite in float32 either{place}: look at the data, the parameters and the learning rate."


_ADVICE = {
    "finite": _finite,
    "rounding": _rounding,
    "scale": _scale,
    "layer": _layer,
    "forward": _forward,
    "model": _model,
}
