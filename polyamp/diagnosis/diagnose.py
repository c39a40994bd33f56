"""The verdict on a skipped step: the step's first tensor that is not finite, in the order of computation, decides.

For example, if a matmul's output in the forward pass is the first, the forward pass overflows and no loss scale helps.
If an activation gradient is the first, and it jumped by `AMPLIFIES` or more powers of two, that layer is to blame;
without such a jump, the loss scale is.

`calibrate` diagnoses a few batches. If a matmul in ``head`` overflows float16 on one of them, it adds the rule
``{"head/matmul": "full"}`` and diagnoses all batches again, until no new rule is needed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from polyamp.diagnosis.probe import Probe, record, sixteen_bit, written
from polyamp.diagnosis.recording import ACTIVATION, GRADIENT, Observation, Recording, Rounding, rounding
from polyamp.diagnosis.spread import Window
from polyamp.errors import InvalidTypeError, check_arguments, reading, refuses_unreadable
from polyamp.formats import format_of
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy
from polyamp.report import Report, plural, power
from polyamp.settings import LossScale

AMPLIFIES = 4.0
"""Powers of two that a gradient has to grow in one operation for that operation to be called amplifying.

From layer to layer, the largest gradient changes by a factor of a few (initialisation schemes keep it level). A factor
of 16 or more in one operation is caused by that operation, not by the loss scale.
"""

ATTEMPTS = 4
"""How often `diagnose` adds rules, each time for an overflow that the last attempt left."""

ROUNDS = 16
"""How often, at most, all batches are diagnosed. Each round but the last adds a rule."""

_BEFORE, _AFTER = 5, 2  # tensors to show around the first bad one

VerdictKind = Literal["finite", "rounding", "scale", "layer", "forward", "model"]


@dataclass(frozen=True)
class Verdict(Report):
    """The result of `polyamp.diagnose`. Prints the first tensor that is not finite, its neighbours, and what to do."""

    RIGHT = (3, 4)

    recording: Recording  # one step under the policy, with scaled gradients
    wide: Recording  # the same step computed in float32
    probe: Probe  # what that run shows about the loss scale
    # rules that were tried, before the policy's own; see `polyamp.diagnose`
    tried: Mapping[str, str] = field(default_factory=dict)
    is_cured: bool = False  # whether the step was finite with them
    lower: LossScale | None = None  # settings with a smaller scale that was tried, and the step was finite

    @cached_property
    def first(self) -> Observation | None:
        """Return the first tensor that only 16 bits make non-finite; else the first non-finite one but for masks."""
        bad = [one for one in self.recording.observations if not one.spread.is_finite]
        own = (one for one in bad if (twin := self._in_float32(one)) is None or twin.spread.is_finite)
        return next(own, self.recording.broken)

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
        """Return how 16 bits change the step's values; None if they do not."""
        suits = self.probe.suits(self.recording.scale)
        return rounding(self.recording.unscaled(), self.wide, gradients=suits)

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
        """Return the same tensor in the float32 run."""
        same = (key for key, one in self.recording.numbered.items() if one is wanted)
        return next(map(self.wide.numbered.get, same), None)

    @property
    def rules(self) -> dict[str, str]:
        """Return rules that keep the cause in float32, to paste into a policy; empty if no rule helps."""
        return dict(self.tried) if self.is_cured else self.culprits

    @cached_property
    def culprits(self) -> dict[str, str]:
        """Return rules for the operations to blame alone; see `kind`."""
        if self.kind == "forward" and self.probe.rules:
            return self.probe.rules
        found = self.culprit
        if found is None:
            return {}
        return {found.where if self.kind == "layer" and found.where else found.pattern: "full"}

    @cached_property
    def culprit(self) -> Observation | None:
        """Return the operation to blame, if a rule helps: see `kind`."""
        if self.rounding and self.kind == "rounding":
            return self._before(self.rounding.first)
        if self.kind == "layer":
            return self._jump[0]
        if self.kind == "forward" and self.first is not None:
            # A result of float32 work that does not fit overflows only where it is rounded for the next operation.
            later = self.recording.observations[self._place :]
            bad = (one for one in later if one.kind == ACTIVATION and one.is_low and not one.spread.is_finite)
            after = next((one for one in bad if not one.is_rounding), None) if self.first.is_rounding else None
            return after or self._before(self.first)
        return None

    def _before(self, one: Observation) -> Observation:
        """Return a tensor if it is in 16 bits, else the last 16-bit one of the forward pass before it."""
        if one.is_low:
            return one
        earlier = itertools.takewhile(lambda each: each is not one, self.recording.of_kind(ACTIVATION))
        return next((each for each in reversed(list(earlier)) if each.is_low), one)

    @property
    def advice(self) -> str:
        """Return the verdict in a sentence or two, with what to do."""
        scale, window = power(self.recording.scale), self.probe.window
        is_usable = window is not None and not window.is_empty
        if self.kind == "finite":
            return f"FINITE: nothing overflows at a loss scale of {scale}; a step like this is applied."
        if self.kind == "model":
            broken = self.probe.broken
            place = "" if broken is None else f" in the {broken.kind} {broken.place}"
            return (
                f"MODEL is not finite in float32 either{place}: look at the data, the parameters and the learning rate."
            )
        start = f" Start with {written(self.lower)} (tried: the step is then finite)" if self.lower else ""
        if self.kind == "scale" and not (window and is_usable):
            told = " ".join(self.probe.sentences()[: -1 if start else None])
            return f"SCALE of {scale} is too high.{start and f'{start}.'} {told}"
        if self.kind == "scale" and window:
            halvings = max(1, math.ceil(math.log2(self.recording.scale / window.high) - self.probe.margin))
            return (
                f"SCALE of {scale} is too high, which is normal while it is looked for: a dynamic scale passes after "
                f"about {plural(halvings, 'skipped step')}. The safe window is {window}; start with "
                f"{written(self.probe.recommended)}."
            )
        if start and not is_usable:
            return (
                f"{self.fault}.{start}; if that trains worse than float32, keep it float32: rules={self.rules!r}"
                f"{self._outcome}."
            )
        holds = self.kind == "layer" and window and is_usable and self.recording.scale > window.high
        lower = f" A loss scale within {window} helps too." if holds else ""
        return f"{self.fault}; keep it float32: rules={self.rules!r}{self._outcome}.{lower}"

    @property
    def fault(self) -> str:
        """Return what is wrong with the operation to blame."""
        culprit = self.culprit
        if self.kind == "layer" and culprit:
            place = culprit.where or culprit.place
            return f"LAYER {place} amplifies gradients by 2^{self.amplification:.1f} in {culprit.name}"
        if self.kind == "forward" and culprit:
            wide, most = self._in_float32(culprit), format_of(culprit.format).max
            largest = f" (float32 has {wide.spread.largest:.3g}, {culprit.format} ends at {most:.5g})" if wide else ""
            return f"FORWARD pass overflows in {culprit.place}{largest}: lowering the loss scale can never help"
        return f"ROUNDING: nothing overflows, but {self.rounding}. No loss scale helps"

    @property
    def is_safe(self) -> bool:
        """Return whether some loss scale suits the step, and its loss agrees with float32's."""
        return self.kind in ("finite", "scale") and self.probe.is_safe

    @property
    def needs_rules(self) -> bool:
        """Return whether only rules help, and no smaller loss scale does."""
        window = self.probe.window
        is_amplified = self.kind == "layer" and self.is_cured and window is not None and window.is_empty
        return self.kind in ("forward", "rounding") or (is_amplified and self.lower is None)

    @property
    def _outcome(self) -> str:
        """Return, as a sentence, whether the rules helped when they were tried."""
        if self.is_cured:
            return f" (tried: the step is then {'as in float32' if self.kind == 'rounding' else 'finite'})"
        if not self.tried:
            return ""
        below = "what is rounded before it differs too" if self.kind == "rounding" else None
        return f" (tried: not enough alone, since {below or '16-bit layers below take what is too large'})"

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict as JSON values."""
        return {
            "verdict": self.kind,
            "advice": self.advice,
            "rules": self.rules,
            "rules_suffice": self.is_cured,
            "scale": self.recording.scale,
            "window": self.probe.window and self.probe.window.as_dict(),
            "first": None if self.first is None else self.first.as_dict(),
            "amplification": self.amplification,
            "rounding": self.rounding and self.rounding.as_dict(),
            "tensors": [one.as_dict() for one in self.recording.observations],
        }

    def heading(self) -> str:
        """Return which step was run, and its first tensor that is not finite."""
        first, found = self.first, "every tensor is finite, or infinite in float32 too"
        if all(one.spread.is_finite for one in self.recording.observations):
            found = "every tensor is finite"
        if first is not None:
            spread = first.spread
            counts = [f"{count} {word}" for count, word in ((spread.inf, "inf"), (spread.nan, "NaN")) if count]
            found = f"the first that is not finite is the {first.kind} {first.place}, "
            found += f"{' and '.join(counts)} of {spread.elements}"
        scale = power(self.recording.scale)
        return f"{self.recording.framework}, {self.recording.policy}, loss scale {scale}: {found}"

    def rows(self) -> list[tuple[str, ...]]:
        """Return the first bad tensor with those around it; without one, the tensors nearest to overflow."""
        named = list(zip(self.recording.observations, self.recording.names, strict=True))
        shown = named[max(0, self._place - _BEFORE) : self._place + 1 + _AFTER]
        if self.first is None:
            low = [pair for pair in named if pair[0].is_low]
            shown = sorted(low, key=lambda pair: pair[0].spread.headroom(pair[0].format))[:_BEFORE]
        header = ("kind", "tensor", "format", "amax", "headroom", "")
        return [header, *(_row(one, name, one is self.first) for one, name in shown)]

    def sentences(self) -> list[str]:
        """Return the verdict."""
        return [f"verdict: {self.advice}"]


def _row(one: Observation, name: str, is_first: bool) -> tuple[str, ...]:
    spread = one.spread
    largest = f"{spread.largest:.3g}" if spread.is_finite else "inf" if spread.inf else "nan"
    headroom = f"{spread.headroom(one.format):+.1f} bits" if spread.is_finite else ""
    return one.kind, name, one.format, largest, headroom, "<- the first" if is_first else ""


@refuses_unreadable
def diagnose(
    step: Any,
    /,
    *args: Any,
    policy: Policy | str | None = None,
    scale: float | None = None,
    backend: str | None = None,
    **kwargs: Any,
) -> Verdict:
    """Explain why a step is skipped: the scale is too high, a layer amplifies gradients, or the forward pass overflows.

    If nothing overflows, report whether the loss agrees with float32's, since rounding may change it.

    The step is run under the policy, in float32, and with each suggested rule to see whether it helps. Everything that
    the step changes is restored.

    >>> import jax.numpy as jnp
    >>> def loss_fn(params, x):
    ...     return (x @ params["w"]).mean()
    >>> verdict = diagnose(loss_fn, {"w": jnp.full((4, 2), 300.0)}, jnp.full((8, 4), 300.0), policy="mixed_float16")
    >>> verdict.kind, verdict.rules
    ('forward', {'matmul': 'full'})

    Args:
        step: as for `probe`.
        *args: its arguments: those of the skipped step.
        policy: as for `probe`.
        scale: the loss scale; None is the scale that the step uses, or else the policy's first one.
        backend: as for `probe`.
        **kwargs: the step's keyword arguments.

    Raises:
        InvalidTypeError, InvalidValueError, UnsupportedError: as `probe` does.
    """
    chosen = sixteen_bit(policy)
    wide = record(step, args, kwargs, chosen, backend, widened=True, scale=scale)
    first = scale if scale is not None or wide.differentiates else chosen.loss_scale.init

    def run(under: Policy, at: float | None = first) -> Recording:
        return record(step, args, kwargs, under, backend, widened=False, scale=at)

    verdict = Verdict(run(chosen), wide.unscaled(), Probe(wide.unscaled().by_layer(), chosen.compute))
    lower = verdict.probe.recommended
    can_try = verdict.kind in ("layer", "scale") and not wide.differentiates and lower.init < verdict.recording.scale
    if can_try and replace(verdict, recording=run(chosen, lower.init)).kind == "finite":
        verdict = replace(verdict, lower=lower)
    latest, rules, is_cured = verdict, dict[str, str](), False
    # A value that a rule keeps in float32 may overflow in the next operation, which then needs another rule.
    for _ in range(ATTEMPTS):
        if is_cured or latest.culprits.keys() <= rules.keys():
            break
        rules |= latest.culprits
        latest = replace(verdict, recording=run(make_policy(chosen, rules=rules)))
        is_cured = _is_cured(verdict, latest)
    return replace(verdict, tried=rules, is_cured=is_cured)


def _is_cured(verdict: Verdict, latest: Verdict) -> bool:
    """Return whether the fault is gone. Gradients that overflow only because of the loss scale do not count."""
    if verdict.kind == "rounding":
        loss = latest.recording.loss
        return loss is not None and math.isfinite(loss) and latest.rounding is None
    return latest.kind in ("finite", "scale")


@dataclass(frozen=True)
class Calibration(Report):
    """The result of `calibrate`: rules, the reason for each, and the verdicts without and with them."""

    policy: Policy  # the policy with these rules before its own
    reasons: Mapping[str, Verdict]  # by rule: the first verdict that asked for it
    before: tuple[Verdict, ...]  # one for each batch, under the original policy
    after: tuple[Verdict, ...]  # the same under the rules

    @property
    def rules(self) -> dict[str, str]:
        """Return the class for each pattern, as in ``polyamp.policy(name, rules=calibration.rules)``."""
        return dict.fromkeys(self.reasons, "full")

    @property
    def is_safe(self) -> bool:
        """Return whether, with the rules, some loss scale suits every batch and the loss agrees with float32's."""
        window = _window(self.after)
        return all(one.is_safe for one in self.after) and not (window is not None and window.is_empty)

    def as_dict(self) -> dict[str, Any]:
        """Return the calibration as JSON values."""
        return {
            "policy": str(self.policy),
            "rules": self.rules,
            "why": {rule: verdict.fault for rule, verdict in self.reasons.items()},
            "safe": self.is_safe,
            "before": [one.kind for one in self.before],
            "after": [one.kind for one in self.after],
        }

    def heading(self) -> str:
        """Return one line: the framework, the policy, and the numbers of batches and of rules."""
        recording, batches = self.before[0].recording, plural(len(self.before), "batch", "es")
        return f"{recording.framework}, {recording.policy}: {batches}, {plural(len(self.reasons), 'rule')} to add"

    def rows(self) -> list[tuple[str, ...]]:
        """Return a row for each rule, with what was observed."""
        each = [(rule, verdict.fault) for rule, verdict in self.reasons.items()]
        return [("rule", "why"), *each] if each else []

    def sentences(self) -> list[str]:
        """Return the rules to paste, the safe loss scales without and with them, and what they do not mend."""
        rules = ["rules={", *(f'    "{rule}": "{name}",' for rule, name in self.rules.items()), "}", ""]
        scales = f"safe loss scales: {_scales(self.before)}; with the rules: {_scales(self.after)}"
        left = [f"not safe: {one.advice}" for one in self.after if not one.is_safe]
        if not (left or self.is_safe):
            left.append("not safe: a loss scale that one batch needs is too large for another; bfloat16 needs none")
        return [*(rules if self.rules else []), scales, *left[:1]]


@refuses_unreadable
def calibrate(
    fn: Any, batches: Iterable[Any], policy: Policy | str | None = None, *, backend: str | None = None, **kwargs: Any
) -> Calibration:
    """Diagnose a step on a few batches and return the rules that this model needs in addition to a policy's.

    A rule is added for what overflows in the forward pass or changes the loss by its rounding; and for a layer that
    amplifies gradients, if the step is finite with that rule and at no smaller loss scale.

    >>> import jax.numpy as jnp
    >>> def loss_fn(params, x):
    ...     return (x @ params["w"] * 1e-6).mean()
    >>> params, batch = {"w": jnp.full((4, 2), 300.0)}, jnp.full((8, 4), 300.0)
    >>> calibrate(loss_fn, [(params, batch)], "mixed_float16").rules
    {'matmul': 'full'}

    Args:
        fn: a step, as for `polyamp.probe`.
        batches: the step's arguments: for each batch a tuple, or the single argument.
        policy: a policy or its name; None means the same as in `polyamp.probe`.
        backend: the framework's name, if neither the step nor the batches show it.
        **kwargs: for all batches: the step's keyword arguments, and ``scale`` as for `polyamp.diagnose`.

    Raises:
        InvalidTypeError: ``fn`` is not callable, or returns no loss.
        InvalidValueError: there are no batches.
        UnsupportedError: the framework's adapter cannot record steps.
    """
    is_iterable = isinstance(batches, Iterable)
    check_arguments("calibrate", [("batches", batches, is_iterable, "an iterable of arguments")], InvalidTypeError)
    with reading(batches, where="calibrate(batches=)"):
        one_by_one = iter(batches)
    chosen, steps = sixteen_bit(policy), [batch if isinstance(batch, tuple) else (batch,) for batch in one_by_one]
    allowed = "the arguments of a few steps: [(params, batch), ...]"
    check_arguments("calibrate", [("batches", steps, steps, allowed)], what="nothing to calibrate on")
    reasons: dict[str, Verdict] = {}
    before: tuple[Verdict, ...] = ()
    for _ in range(ROUNDS):
        ruled = make_policy(chosen, rules=dict.fromkeys(reasons, "full"))
        after = tuple(diagnose(fn, *args, policy=ruled, backend=backend, **kwargs) for args in steps)
        before = before or after
        new = {rule: one for one in reversed(after) if one.needs_rules for rule in one.rules if rule not in reasons}
        if not new:
            break
        reasons |= new
    return Calibration(ruled, reasons, before, after)


def _window(verdicts: Sequence[Verdict]) -> Window | None:
    """Return the loss scales that suit every batch; None if all do, since no gradient is in 16 bits."""
    windows = [one.probe.window for one in verdicts if one.probe.window is not None]
    return Window(max(one.low for one in windows), min(one.high for one in windows)) if windows else None


def _scales(verdicts: Sequence[Verdict]) -> str:
    if any(one.probe.overflowing for one in verdicts):
        return "none, the forward pass overflows"
    window = _window(verdicts)
    if window is None:
        return "any, no gradient is in 16 bits"
    return f"none (at least {power(window.low)}, at most {power(window.high)})" if window.is_empty else str(window)
