"""Calibration: a few batches show which operations of a model need float32 in addition to those of the policy.

It is the trial of rules of `polyamp.diagnosis.diagnose`, over several batches and with the evidence for each rule. For
example, if a matmul in ``head`` overflows float16 on one of the batches, `calibrate` returns the rule
``{"head/matmul": "full"}``, runs the batches again with it, and looks at what is left.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from polyamp.diagnosis.diagnose import Verdict, with_rules
from polyamp.diagnosis.probe import Probe, makers, record, sixteen_bit
from polyamp.diagnosis.recording import ACTIVATION, PARAMETER, Observation, Recording
from polyamp.diagnosis.rounding import rounding
from polyamp.errors import InvalidValueError, check_range
from polyamp.formats import format_of
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy
from polyamp.report import Report, finite, plural, power
from polyamp.report import share as percentage

ROUNDS = 16
"""How often, at most, rules are added and the batches are run again. Each round keeps at least one more in float32."""


class Evidence(NamedTuple):
    """The reason for a rule."""

    rule: str  # the pattern: one operation at one path
    op_class: str  # the class that the rule assigns
    place: str  # the operation with its path, as recorded
    was: str  # its class without the rule
    why: str  # what was observed, in words
    largest: float  # largest observed magnitude, in float32
    lost: float  # share of the L1 mass that the format would lose
    # powers of two between the largest magnitude and the format's maximum; for gradients, without a loss scale
    headroom: float
    batches: int = 1  # number of batches it is based on


@dataclass(frozen=True)
class Calibration(Report):
    """The result of `calibrate`: rules, the evidence for each, and the model without and with them."""

    RIGHT = (3, 4, 5)

    policy: Policy  # the policy with these rules before its own
    evidence: tuple[Evidence, ...]  # why each rule is there
    batches: int  # number of batches
    before: Probe  # all batches under the original policy
    after: Probe  # the same under the rules

    @cached_property
    def rules(self) -> dict[str, str]:
        """Return the class for each pattern, as in ``polyamp.policy(name, rules=calibration.rules)``."""
        return {one.rule: one.op_class for one in self.evidence}

    @property
    def is_safe(self) -> bool:
        """Return whether, with the rules, the forward pass fits and some loss scale suits all gradients."""
        return self.after.is_safe

    def as_dict(self) -> dict[str, Any]:
        """Return the calibration as JSON values."""
        return {
            "policy": str(self.policy),
            "rules": self.rules,
            "batches": self.batches,
            "safe": self.is_safe,
            "evidence": [{**one._asdict(), "headroom": finite(one.headroom)} for one in self.evidence],
            "before": _summary(self.before),
            "after": _summary(self.after),
        }

    def heading(self) -> str:
        """Return what was calibrated on how many batches."""
        recording = self.before.recording
        counts = f"{plural(self.batches, 'batch', 'es')}, {plural(len(self.evidence), 'rule')} to add"
        return f"{recording.framework}, {recording.policy}: {counts}"

    def rows(self) -> list[tuple[str, ...]]:
        """Return a row for each rule, with what was observed."""
        header = ("rule", "class", "was", "amax", "L1 lost", "headroom", "why")
        return [header, *map(_row, self.evidence)] if self.evidence else []

    def sentences(self) -> list[str]:
        """Return the rules to paste, and the safe loss scales without and with them."""
        rules = ["rules={", *(f'    "{rule}": "{name}",' for rule, name in self.rules.items()), "}", ""]
        scales = f"safe loss scales: {_scales(self.before)}; with the rules: {_scales(self.after)}"
        return [*(rules if self.rules else []), scales, *([] if self.is_safe else self.after.sentences())]


def calibrate(
    fn: Any,
    batches: Iterable[Any],
    policy: Policy | str | None = None,
    *,
    share: float = 0.01,
    margin: float = 3.0,
    backend: str | None = None,
) -> Calibration:
    """Run a step on a few batches and return the rules that this model needs in addition to a policy's.

    An operation that the policy computes in 16 bits is kept in float32 if it overflows there, loses more than
    ``share``, changes the loss by its rounding, or has gradients that no loss scale suits together with the others.

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
        share: share of the L1 mass of a 16-bit activation that may be lost, from 0 to 1.
        margin: powers of two to keep free above the largest gradient.
        backend: the framework's name, if neither the step nor the batches show it.

    Raises:
        InvalidTypeError: ``fn`` is not callable, or returns no loss.
        InvalidValueError: there are no batches, or a share or margin is outside its range.
        UnsupportedError: the framework's adapter cannot record steps.
    """
    chosen, steps = sixteen_bit(policy), [batch if isinstance(batch, tuple) else (batch,) for batch in batches]
    if not steps:
        raise InvalidValueError(
            "nothing to calibrate on",
            where="calibrate(batches)",
            found="no batches",
            allowed="at least one",
            fix="give the arguments of a few steps: [(params, batch), ...]",
        )
    check_range("share", share, 0.0, 1.0, where="calibrate(share=)")
    check_range("margin", margin, 0.0, 100.0, where="calibrate(margin=)")
    evidence: dict[str, Evidence] = {}

    def observe(rules: Mapping[str, str], widened: bool) -> Recording:
        ruled = make_policy(chosen, rules=rules)
        return merged(record(fn, args, {}, ruled, backend, widened=widened, scale=None) for args in steps)

    def asked(probe: Probe) -> dict[str, str]:
        for one in unfit(probe, lambda: observe(_rules(evidence), widened=False), share):
            evidence.setdefault(one.rule, one._replace(batches=len(steps)))  # the first of several at one place
        return _rules(evidence)

    before = Probe(observe({}, widened=True), chosen.compute, margin=margin)
    after, rules = with_rules(before, lambda rules: replace(before, recording=observe(rules, True)), asked, ROUNDS)
    if rules:  # otherwise the last round found that rounding changes nothing
        after = replace(after, rounding=rounding(observe(rules, widened=False), after.recording))
    kept = tuple(one for rule, one in evidence.items() if rule in rules)
    return Calibration(make_policy(chosen, rules=rules), kept, len(steps), before, after)


def merged(recordings: Iterable[Recording]) -> Recording:
    """Merge recordings of one step on several batches into one for a probe: each tensor gets the elements of all."""
    each = [recording.unscaled().by_layer() for recording in recordings]
    found: dict[Hashable, Observation] = {}
    for recording in each:
        seen = Counter[Hashable]()
        for one in recording.observations:
            like = (one.kind, one.place, one.format)
            known = found.get((like, seen[like]))
            found[like, seen[like]] = one if known is None else known._replace(spread=known.spread.merged(one.spread))
            seen[like] += 1
    return replace(each[0], observations=tuple(found.values()))


def unfit(probe: Probe, run: Callable[[], Recording], share: float) -> Sequence[Evidence]:
    """Return the evidence against 16 bits: the findings of the first check that finds anything."""
    # Later checks are not used, since their findings may be effects of the same fault. ``run`` records the same step in
    # the formats themselves.
    if probe.broken:
        return []
    return overflowing(probe) or too_narrow(probe, share) or changed(probe, run()) or list(without_a_scale(probe))


def overflowing(probe: Probe) -> list[Evidence]:
    """Return the operations of the forward pass that overflow the format."""
    most = format_of(probe.format).max
    return [
        _evidence(probe, one, f"{one.spread.largest:.3g} is beyond {probe.format}, which ends at {most:g}")
        for one in makers(probe.overflowing)
    ]


def too_narrow(probe: Probe, tolerated: float) -> list[Evidence]:
    """Return the operations of the forward pass whose results are too small for the format."""
    losing = [one for one in _forward(probe.recording) if one.spread.lost(probe.format) > tolerated]
    return [
        _evidence(
            probe, one, f"{percentage(one.spread.lost(probe.format))} of its L1 mass would be lost in {probe.format}"
        )
        for one in makers(losing)
    ]


def changed(probe: Probe, narrow: Recording) -> list[Evidence]:
    """Return the operation whose result in the format is not finite, or so rounded that the loss changes."""
    forward = replace(narrow, observations=tuple(narrow.of_kind(ACTIVATION)))
    verdict = Verdict(forward, probe.recording, probe)
    culprit, found = verdict.culprit, verdict.rounding
    if culprit is None or not culprit.is_low:
        return []
    why = f"an input of it is beyond {probe.format}: the result is not finite there"
    if found is not None:
        why = f"rounded to {probe.format} it changes the loss: {found.loss:.4g} for {found.loss_float32:.4g}"
    elif culprit.spread.is_finite:
        why = f"rounded to {probe.format} it makes what follows infinite or NaN"
    same = (one for one in probe.recording.of_kind(ACTIVATION) if one.place == culprit.place and not one.is_rounding)
    return [_evidence(probe, one, why) for one in same][:1]


def without_a_scale(probe: Probe) -> Iterator[Evidence]:
    """Yield the fewest places that have to leave 16 bits so that one loss scale suits all other gradients."""
    if probe.window is None or not probe.window.is_empty:
        return
    counting = {id(one) for one in probe.counting}
    limits = [
        (one, probe.need(one) if id(one) in counting else 0.0, probe.tolerate(one) * 2.0**-probe.margin)
        for one in probe.bounding
    ]
    made_by = {id(one): _makers(probe.recording, one) for one in probe.bounding}

    def against(scale: float) -> list[Observation]:
        return [one for one, low, high in limits if not low <= scale <= high]

    def cost(scale: float) -> tuple[int, float]:
        made = [made_by[id(one)] for one in against(scale)]
        return len({maker.place for each in made for maker in each}) + len(made_by) * made.count([]), -scale

    scales = {edge for _, low, high in limits for edge in (low, high) if 0 < edge < math.inf}
    best = min(scales, key=cost)
    for one in against(best):
        needs = f"needs a loss scale of {power(probe.need(one))} to {power(probe.tolerate(one))}; others, {power(best)}"
        for maker in made_by[id(one)]:
            yield _evidence(probe, maker, f"its {one.kind} {needs}", observed=one)


def _makers(recording: Recording, one: Observation) -> list[Observation]:
    """Return the 16-bit forward operations that a gradient belongs to."""
    # These are the operations of the same name at the gradient's path; without any, the products at that path.
    if one.is_rounding:  # the gradient of a float32 operation, rounded for the product before it
        forward = list(recording.of_kind(ACTIVATION))
        places = [each.place for each in forward]
        before = forward[: places.index(one.place)] if one.place in places else forward
        return [each for each in before if each.is_low and each.op_class == "lower"][-1:]
    path = re.split(r"[./]", one.where)
    if one.kind == PARAMETER:  # its name may start with modules above the one that the step calls
        whole = "/".join(re.split(r"[./]", one.name)[:-1])
        here = [each for each in _forward(recording) if _is_end_of(each.where, whole)]
    else:
        here = [each for each in _forward(recording) if re.split(r"[./]", each.where) == path]
    same = [each for each in here if each.name == one.name]
    return same or [each for each in here if each.op_class == "lower"]


def _is_end_of(path: str, whole: str) -> bool:
    return f"/{whole}".endswith(f"/{path.replace('.', '/')}") if path else not whole


def _forward(recording: Recording) -> list[Observation]:
    low = (one for one in recording.of_kind(ACTIVATION) if one.is_low and not one.is_rounding)
    return [one for one in low if one.spread.is_finite]


def _evidence(probe: Probe, maker: Observation, why: str, *, observed: Observation | None = None) -> Evidence:
    spread = (observed or maker).spread
    sizes = (spread.largest, spread.lost(probe.format), spread.headroom(probe.format))
    return Evidence(maker.pattern, "full", maker.place, maker.op_class, why, *sizes)


def _rules(evidence: Mapping[str, Evidence]) -> dict[str, str]:
    return {one.rule: one.op_class for one in evidence.values()}


def _summary(probe: Probe) -> dict[str, Any]:
    window, places = probe.window, [one.place for one in probe.overflowing]
    return {"safe": probe.is_safe, "window": window and window._asdict(), "overflowing": places}


def _scales(probe: Probe) -> str:
    if probe.overflowing:
        return "none, the forward pass overflows"
    window = probe.window
    if window is None:
        return "any, no gradient is in 16 bits"
    return f"none (at least {power(window.low)}, at most {power(window.high)})" if window.is_empty else str(window)


def _row(one: Evidence) -> tuple[str, ...]:
    headroom = f"{one.headroom:+.1f} bits" if math.isfinite(one.headroom) else ""
    return one.rule, one.op_class, one.was, f"{one.largest:.3g}", percentage(one.lost), headroom, one.why
