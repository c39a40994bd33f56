"""The verbs that examine one step: `probe` and `diagnose`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from polyamp.diagnosis.probe import Probe
from polyamp.diagnosis.recording import Recording
from polyamp.diagnosis.rounding import rounding
from polyamp.diagnosis.verdict import Verdict
from polyamp.dispatch import RECORD, offering
from polyamp.formats import format_of
from polyamp.policies import Policy, current_policy
from polyamp.policies import policy as make_policy
from polyamp.validation import check_callable, check_range

ATTEMPTS = 4
"""How often `diagnose` adds rules, each time for an overflow that the last attempt left."""


def probe(
    step: Any,
    /,
    *args: Any,
    policy: Policy | str | None = None,
    format: str | None = None,
    tolerance: float = 1e-3,
    margin: float = 3.0,
    scale: float | None = None,
    backend: str | None = None,
    **kwargs: Any,
) -> Probe:
    """Examine every tensor of one training step, computed in float32, and report which loss scales are safe in 16 bits.

    The step is also run under the policy, and its loss and tensors are compared: see ``Probe.rounding``.

    >>> import jax.numpy as jnp
    >>> def loss_fn(params, x):
    ...     return ((x @ params["w"]) ** 2).mean()
    >>> report = probe(loss_fn, {"w": jnp.full((4, 2), 1e-4)}, jnp.ones((8, 4)), policy="mixed_float16")
    >>> report.window, report.recommended
    (Window(2^-10 .. 2^24), LossScale())

    Args:
        step: a function that returns the loss, which the recorder differentiates (JAX: with respect to the first
            argument); or a whole training step, recorded up to the optimizer's update; or a compiled Keras model.
            Everything that it changes is restored.
        *args: its arguments: a real batch, and in JAX the parameters.
        policy: the policy that the step will train under; None is the current policy if that computes in 16 bits, else
            ``mixed_float16``. Only tensors that it computes in 16 bits limit the loss scale.
        format: examine the same tensors for another format than the policy's compute format.
        tolerance: share of a gradient's L1 mass that may be lost; the default is 0.1 % of the update.
        margin: powers of two to keep free above the largest gradient, since other batches have larger ones.
        scale: the factor by which a training step multiplies its loss, if polyamp cannot see it
            (``torch.amp.GradScaler``).
        backend: the framework's name, if neither the function nor the arguments show it and several are loaded.
        **kwargs: the step's keyword arguments.

    Raises:
        InvalidTypeError: ``step`` is not callable, or returns no loss.
        InvalidValueError: a tolerance, margin or scale is outside its range.
        UnsupportedError: the framework's adapter cannot record steps.

    Source of the rule: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2, choose a scale from
    histograms of activation gradients; polyamp uses the share of L1 mass, for every tensor in 16 bits.
    """
    chosen = sixteen_bit(policy)
    name = format_of(chosen.compute if format is None else format, where="probe(format=)").name
    check_range("tolerance", tolerance, 0.0, 1.0, where="probe(tolerance=)")
    check_range("margin", margin, 0.0, 100.0, where="probe(margin=)")
    recording = record(step, args, kwargs, chosen, backend, widened=True, scale=scale)
    found = None
    if name == chosen.compute:
        own = scale if scale is not None or recording.differentiates else 1.0
        found = rounding(record(step, args, kwargs, chosen, backend, widened=False, scale=own), recording)
    return Probe(recording.unscaled().by_layer(), name, tolerance, margin, found)


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
    it changes is restored.

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

    def run(under: Policy) -> Recording:
        return record(step, args, kwargs, under, backend, widened=False, scale=first)

    verdict = Verdict(run(chosen), wide.unscaled(), Probe(wide.unscaled().by_layer(), chosen.compute))
    return _with_rules_tried(verdict, chosen, run)


def _with_rules_tried(verdict: Verdict, policy: Policy, run: Callable[[Policy], Recording]) -> Verdict:
    """Run the step with the verdict's rules, and return the verdict with the outcome.

    A value that a rule keeps in float32 may overflow in the next operation, which then needs another rule.
    """
    rules: dict[str, str] = {}
    latest = verdict
    for _ in range(ATTEMPTS):
        if latest.culprits.keys() <= rules.keys() or (rules and _is_cured(verdict, latest)):
            break
        rules |= latest.culprits
        latest = replace(verdict, recording=run(make_policy(policy, rules=rules)))
    return replace(verdict, tried=rules, is_cured=bool(rules) and _is_cured(verdict, latest))


def _is_cured(verdict: Verdict, latest: Verdict) -> bool:
    """Return whether the fault is gone. Gradients that overflow with correct values are a matter of the loss scale."""
    if verdict.kind == "rounding":
        loss = latest.recording.loss
        return loss is not None and math.isfinite(loss) and latest.rounding is None
    return latest.kind in ("finite", "scale")


def record(
    step: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    policy: Policy,
    backend: str | None,
    *,
    widened: bool,
    scale: float | None,
) -> Recording:
    """Record one step with its framework's adapter; see `polyamp.adapter.Record`.

    Raises:
        InvalidTypeError: ``step`` is not callable, or no adapter knows it and its arguments.
        InvalidValueError: the scale is not positive and finite.
        UnsupportedError: the framework's adapter cannot record steps.
    """
    check_callable(
        step,
        where="the step",
        allowed="a function that returns the loss, a training step, or a Keras model",
        fix="give the function itself, then its arguments: polyamp.probe(loss_fn, params, batch)",
    )
    if scale is not None:
        limits = format_of("float32")
        check_range("scale", scale, limits.smallest_normal, limits.max, where="scale=")
    adapter = offering(RECORD, backend, (step, args, kwargs), where="the step and its arguments")
    return RECORD.of(adapter)(step, args, kwargs, policy, widened=widened, scale=scale)


def sixteen_bit(policy: Policy | str | None) -> Policy:
    """Return the policy to examine: the given one, else the current one if it computes in 16 bits, else mixed_float16.

    >>> sixteen_bit(None).compute
    'float16'
    """
    if policy is not None:
        return make_policy(policy)
    current = current_policy()
    return current if format_of(current.compute).is_low else make_policy("mixed_float16")
