"""Calibration: a few batches show which operations of a model need float32 and which can do without it.

For example, if a matmul in ``head`` overflows float16 on one of the batches, `calibrate` returns the rule
``{"head/matmul": "full"}``, and the evidence for it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from polyamp.diagnosis.evidence import Evidence, overflowing, poisoned, relaxable, rounded, too_narrow, without_a_scale
from polyamp.diagnosis.probe import Probe
from polyamp.diagnosis.recording import Observation, Recording
from polyamp.diagnosis.rounding import rounding
from polyamp.diagnosis.verbs import record, sixteen_bit
from polyamp.dispatch import AUTOCAST_FUNCTION, RECORD, offering
from polyamp.errors import InvalidValueError
from polyamp.layout import JsonReport, aligned, finite, plural, power, share
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy
from polyamp.rewriting import explain
from polyamp.validation import check_range

ROUNDS = 16
"""How often, at most, rules are added and the batches are run again. Each round keeps at least one more in float32."""

Observe = Callable[[Policy, bool], Recording]


@dataclass(frozen=True)
class Calibration(JsonReport):
    """The result of `calibrate`: rules, the evidence for each, and the model without and with them.

    Attributes:
        policy: the policy with these rules before its own.
        evidence: why each rule is there.
        batches: number of batches.
        before: all batches under the original policy.
        after: the same under the rules.
    """

    policy: Policy
    evidence: tuple[Evidence, ...]
    batches: int
    before: Probe
    after: Probe

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
        rows = ({**one._asdict(), "headroom": finite(one.headroom)} for one in self.evidence)
        return {
            "policy": str(self.policy),
            "rules": self.rules,
            "batches": self.batches,
            "safe": self.is_safe,
            "evidence": list(rows),
            "before": _summary(self.before),
            "after": _summary(self.after),
        }

    def __str__(self) -> str:
        recording, count = self.before.recording, len(self.evidence)
        counts = f"{plural(self.batches, 'batch', 'es')}, {plural(count, 'rule')} to add"
        lines = [f"{recording.framework}, {recording.policy}: {counts}"]
        if self.evidence:
            header = ("rule", "class", "was", "amax", "L1 lost", "headroom", "why")
            lines += ["", aligned([header, *map(_row, self.evidence)], right={3, 4, 5})]
            lines += ["", "rules={", *(f'    "{rule}": "{name}",' for rule, name in self.rules.items()), "}"]
        lines += ["", f"safe loss scales: {_scales(self.before)}; with the rules: {_scales(self.after)}"]
        return "\n".join([*lines, *([] if self.is_safe else self.after.conclusions())])


def calibrate(
    fn: Any,
    batches: Iterable[Any],
    policy: Policy | str | None = None,
    *,
    share: float = 0.01,
    margin: float = 3.0,
    backend: str | None = None,
) -> Calibration:
    """Run a step on a few batches in float32 and return the rules that this model needs in addition to a policy's.

    An operation that the policy computes in 16 bits is kept in float32 if it overflows there, loses more than
    ``share``, changes the loss by its rounding, or has gradients that no loss scale suits together with the others.

    An operation that the table keeps in float32 only for its range is allowed into 16 bits if it stays well inside the
    format here: exponentials, powers, reciprocals and the like. Reductions, losses and normalisations are never
    allowed: they need float32 for the accuracy of their sums, which the range does not show. Logarithms, squares, sines
    and cosines are not allowed either: they depend on bits of their argument that 16-bit formats do not have.

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
        margin: powers of two to keep free above the largest gradient. An operation that is allowed into 16 bits has to
            stay this far inside the format, in both directions.
        backend: the framework's name, if neither the step nor the batches show it.

    Raises:
        InvalidTypeError: ``fn`` is not callable, or returns no loss.
        InvalidValueError: there are no batches, or a share or margin is outside its range.
        UnsupportedError: the framework's adapter cannot record steps.
    """
    chosen, steps = sixteen_bit(policy), _steps(batches)
    check_range("share", share, 0.0, 1.0, where="calibrate(share=)")
    check_range("margin", margin, 0.0, 100.0, where="calibrate(margin=)")

    def observe(policy: Policy, widened: bool) -> Recording:
        return merged(record(fn, args, {}, policy, backend, widened=widened, scale=None) for args in steps)

    def unmatched(policy: Policy) -> Sequence[str]:
        adapter = offering(RECORD, backend, (fn, steps[0]), where="calibrate(fn, batches)")
        if not AUTOCAST_FUNCTION.offered_by(adapter):
            return ()
        return explain(fn, *steps[0], policy=policy, backend=adapter.name).unused_rules

    before = Probe(observe(chosen, True), chosen.compute, margin=margin)
    protecting, protected = _protect(observe, chosen, before, share)
    relaxing, after = _relax(observe, unmatched, _with(chosen, protecting), protected)
    evidence = tuple(one._replace(batches=len(steps)) for one in (*protecting, *relaxing))
    return Calibration(_with(chosen, evidence), evidence, len(steps), before, after)


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


def _protect(observe: Observe, policy: Policy, probe: Probe, share: float) -> tuple[list[Evidence], Probe]:
    """Return the evidence for operations that have to stay in float32, and the probe with those rules."""
    # Each round records again, since operations after float32 work become float32 without a rule.
    found: dict[str, Evidence] = {}
    for _ in range(ROUNDS):
        unfit = _unfit(observe, _with(policy, found.values()), probe, share)
        new = {one.rule: one for one in reversed(unfit) if one.rule not in found}  # the first of several at one place
        if not new:
            break
        found |= new
        probe = replace(probe, recording=observe(_with(policy, found.values()), True))
    if found:  # otherwise the last round already found that rounding changes nothing
        probe = replace(probe, rounding=rounding(observe(_with(policy, found.values()), False), probe.recording))
    return list(found.values()), probe


def _unfit(observe: Observe, policy: Policy, probe: Probe, share: float) -> Sequence[Evidence]:
    """Return the new evidence of a round: the findings of the first check that finds anything."""
    # Later checks are not used, since their findings may be effects of the same fault.
    if probe.broken:
        return []
    return (
        list(overflowing(probe))
        or list(too_narrow(probe, share))
        or _compared(observe(policy, False), probe)
        or list(without_a_scale(probe))
    )


def _compared(narrow: Recording, probe: Probe) -> list[Evidence]:
    """Return evidence from a recording in the formats themselves: a non-finite result, or one that rounding changed."""
    return list(poisoned(narrow, probe)) or list(rounded(narrow, probe))


def _relax(
    observe: Observe, unmatched: Callable[[Policy], Sequence[str]], policy: Policy, probe: Probe
) -> tuple[Sequence[Evidence], Probe]:
    """Return the evidence for operations that can leave float32, and the probe with those rules too."""
    # Only operations that do become 16-bit are included, and none if they make the model unsafe. If a function is
    # transformed before it is differentiated, no rule reaches the operations of its derivative: those are
    # ``unmatched``.
    candidates = list(relaxable(probe)) if probe.is_safe else []
    out_of_reach = set(unmatched(_with(policy, candidates))) if candidates else set()
    candidates = [one for one in candidates if one.rule not in out_of_reach]
    if not candidates:
        return [], probe
    relaxed = replace(probe, recording=observe(_with(policy, candidates), True))
    low = {one.place for one in relaxed.recording.observations if one.is_low and one.op_class == "follow"}
    kept = [one for one in candidates if one.place in low]
    spoilt = _unfit(observe, _with(policy, kept), relaxed, share=1.0) if kept else []
    return (kept, relaxed) if kept and not spoilt else ([], probe)


def _with(policy: Policy, evidence: Iterable[Evidence]) -> Policy:
    return make_policy(policy, rules={one.rule: one.op_class for one in evidence})


def _steps(batches: Iterable[Any]) -> list[tuple[Any, ...]]:
    steps = [batch if isinstance(batch, tuple) else (batch,) for batch in batches]
    if not steps:
        raise InvalidValueError(
            "nothing to calibrate on",
            where="calibrate(batches)",
            found="no batches",
            allowed="at least one",
            fix="give the arguments of a few steps: [(params, batch), ...]",
        )
    return steps


def _summary(probe: Probe) -> dict[str, Any]:
    window = probe.window
    return {
        "safe": probe.is_safe,
        "window": None if window is None else window._asdict(),
        "overflowing": [one.place for one in probe.overflowing],
    }


def _scales(probe: Probe) -> str:
    if probe.overflowing:
        return "none, the forward pass overflows"
    window = probe.window
    if window is None:
        return "any, no gradient is in 16 bits"
    return f"none (at least {power(window.low)}, at most {power(window.high)})" if window.is_empty else str(window)


def _row(one: Evidence) -> tuple[str, ...]:
    headroom = f"{one.headroom:+.1f} bits" if math.isfinite(one.headroom) else ""
    return one.rule, one.op_class, one.was, f"{one.largest:.3g}", share(one.lost), headroom, one.why
