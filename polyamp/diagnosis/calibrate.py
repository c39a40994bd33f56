"""Calibration: a few batches show which operations of a model need float32 in addition to those of the policy.

It repeats `polyamp.diagnose` on every batch. For example, if a matmul in ``head`` overflows float16 on one of them,
`calibrate` adds the rule ``{"head/matmul": "full"}`` and diagnoses all batches again, until no new rule is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyamp.diagnosis.diagnose import Verdict, diagnose
from polyamp.diagnosis.probe import sixteen_bit
from polyamp.diagnosis.spread import Window
from polyamp.errors import InvalidTypeError, check_arguments, reading, refuses_unreadable
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy
from polyamp.report import Report, plural, power

ROUNDS = 16
"""How often, at most, all batches are diagnosed. Each round but the last adds a rule."""


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
        return all(one.is_safe for one in self.after)

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
        """Return what was calibrated on how many batches."""
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


def _scales(verdicts: Sequence[Verdict]) -> str:
    if any(one.probe.overflowing for one in verdicts):
        return "none, the forward pass overflows"
    windows = [one.probe.window for one in verdicts if one.probe.window is not None]
    if not windows:
        return "any, no gradient is in 16 bits"
    window = Window(max(one.low for one in windows), min(one.high for one in windows))
    return f"none (at least {power(window.low)}, at most {power(window.high)})" if window.is_empty else str(window)
