"""The probe: what one step shows about a loss scale, which gradients limit it, and which settings to use.

Each 16-bit gradient needs a scale of at least some power of two, or too much of it rounds to zero, and tolerates at
most another, or it overflows. For example, if a gradient's elements are between 2**-30 and 2**-10, a scale of 2**5
keeps all of them in float16, and from 2**26 on it overflows. The window is the range of scales that suits all
gradients, less a margin at the top.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from polyamp.adapters import find_verb
from polyamp.diagnosis.recording import ACTIVATION, GRADIENT, PARAMETER, Observation, Recording, Rounding, rounding
from polyamp.diagnosis.spread import Window
from polyamp.errors import check_callable, check_range, refuses_unreadable
from polyamp.formats import format_of
from polyamp.nesting import too_deep
from polyamp.policies import Policy, current_policy
from polyamp.policies import policy as make_policy
from polyamp.report import Report, finite, power, share
from polyamp.settings import LossScale

if TYPE_CHECKING:
    from os import PathLike

TOLERANCE = 0.004
"""The share of a gradient's L1 mass that may be lost below a format's range."""

NOISE = 2.0**-20
"""Sums below this share of the step's largest gradient set no lower limit.

Sums that are zero except for rounding, such as the gradient of a bias before a normalisation, are about 2**-24
(float32's epsilon) of their terms. No loss scale is needed to keep them.
"""

_SUMS = ("sum", "scatter", "scatter_add")

_KINDS = {ACTIVATION: "act", GRADIENT: "grad", PARAMETER: "param"}


@dataclass(frozen=True)
class Probe(Report):
    """The result of `polyamp.probe`. Prints as a table of the tensors that matter."""

    RIGHT = (3, 4, 5, 6, 7)

    recording: Recording  # one widened step, gradients unscaled; see `Recording.by_layer`
    format: str  # the 16-bit format in question, used for the tensors that the policy has in 16 bits
    tolerance: float = TOLERANCE  # share of a gradient's L1 mass that may be lost
    # powers of two to keep free above the largest gradient: other batches, and the first steps, have larger gradients
    margin: float = 3.0
    rounding: Rounding | None = None  # how 16 bits change the step's values; None if they agree, or were not compared
    fits: bool = False  # whether the forward pass was sound in 16 bits: what is beyond the format only masks
    is_cured: bool = False  # whether it was sound with `rules`

    @cached_property
    def bounding(self) -> tuple[Observation, ...]:
        """Return the gradients that the policy computes in 16 bits. Only these limit the loss scale."""
        return tuple(one for one in self.recording.of_kind(GRADIENT, PARAMETER) if one.is_low)

    @cached_property
    def window(self) -> Window | None:
        """Return the safe range of loss scales; empty if no scale suits; None if no gradient is in 16 bits."""
        # The lower edge is the largest scale that a gradient needs (`NOISE` excludes some). The upper edge is the
        # smallest of the largest scales that the gradients tolerate, less the margin.
        if not any(one.spread.largest for one in self.bounding):
            return None
        low = max(map(self.need, self.counting), default=0.0)
        return Window(low, 2.0 ** math.floor(math.log2(min(map(self.tolerate, self.bounding))) - self.margin))

    def suits(self, scale: float) -> bool:
        """Return whether a loss scale suits all gradients."""
        return self.window is None or scale in self.window

    def need(self, one: Observation) -> float:
        """Return the smallest scale at which a tensor loses no more than is tolerated."""
        return one.spread.smallest_scale(self.format, self.tolerance)

    def tolerate(self, one: Observation) -> float:
        """Return the largest scale at which a tensor does not overflow."""
        return max(one.spread.largest_scale(self.format), format_of("float32").smallest_normal)

    @cached_property
    def counting(self) -> tuple[Observation, ...]:
        """Return the gradients that set a lower limit: `bounding` without sums that are only noise."""
        limit = NOISE * max((one.spread.largest for one in self.bounding), default=0.0)
        return tuple(one for one in self.bounding if one.spread.largest >= limit or not _is_sum(one))

    @cached_property
    def overflowing(self) -> tuple[Observation, ...]:
        """Return the forward pass's 16-bit tensors that are beyond the format. No loss scale helps there."""
        limit = math.inf if self.fits else format_of(self.format).max
        return tuple(one for one in self._forward if one.spread.is_finite and one.spread.largest > limit)

    @cached_property
    def broken(self) -> Observation | None:
        """Return the first tensor that is not finite even in float32, if precision is not the cause; else None."""
        return self.recording.broken

    @cached_property
    def _forward(self) -> tuple[Observation, ...]:
        return tuple(one for one in self.recording.of_kind(ACTIVATION) if one.is_low)

    @property
    def is_safe(self) -> bool:
        """Return whether some loss scale suits, the forward pass fits, and the loss agrees with float32's."""
        unfit = self.overflowing or self.broken or self.rounding
        return not (unfit or (self.window is not None and self.window.is_empty))

    @property
    def recommended(self) -> LossScale:
        """Return recommended settings: dynamic, starting inside the window, or a check alone if no scale is needed."""
        # The start is that of ``LossScale()`` if the window contains it, else the nearest scale in the window. If the
        # window is empty, it is what all tolerate: too small a scale loses something, and too large a one skips all.
        window, default = self.window, LossScale()
        if window is None or (format_of(self.format).exponent_bits == 8 and 1.0 in window):
            return LossScale.skip_nonfinite()
        high = window.high * 2.0**self.margin if window.is_empty else window.high
        init = min(max(default.init, window.low), high)
        init = min(max(init, format_of("float32").smallest_normal * 2.0**10), 2.0**120)
        return LossScale(init=init, min=min(default.min, init * 2.0**-10), max=max(default.max, init))

    @cached_property
    def rules(self) -> dict[str, str]:
        """Return rules that keep in float32 what overflows in the forward pass, to paste into a policy."""
        return {one.pattern: "full" for one in makers(self.overflowing)}

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values: the window, the recommendation, and every tensor with its limits."""
        return {
            "framework": self.recording.framework,
            "policy": self.recording.policy,
            "format": self.format,
            "loss": finite(self.recording.loss),
            "tolerance": self.tolerance,
            "margin": self.margin,
            "window": self.window and self.window.as_dict(),
            "recommended": self.recommended.to_dict() or {"init": self.recommended.init},
            "safe": self.is_safe,
            "rules": self.rules,
            "rounding": self.rounding and self.rounding.as_dict(),
            "tensors": [self._as_dict(one) for one in self.recording.observations],
        }

    def _as_dict(self, one: Observation) -> dict[str, Any]:
        spread = one.spread
        return {
            **one.as_dict(),
            "flushed": spread.flushed(self.format),
            "lost": spread.lost(self.format),
            "headroom": finite(spread.headroom(self.format)),
            "smallest_scale": self.need(one),
            "largest_scale": finite(spread.largest_scale(self.format)),
        }

    @refuses_unreadable
    def plot(self, path: str | PathLike[str]) -> None:
        """Draw a heat map of all tensors over powers of two, with the format's limits, into an image file."""
        from polyamp.diagnosis.pictures import draw_probe

        window, scale = self.window, self.recommended.init
        about = "no loss scale is needed"
        if window is not None:
            about = f"of gradients at a loss scale of {power(scale)}; safe are {window}"
        policy = self.recording.policy.partition(" ")[0]
        title = f"{self.recording.framework}, {policy}: limits of {self.format}, {about}"
        draw_probe(path, title, self.recording, format_of(self.format), scale)

    def heading(self) -> str:
        """Return which step was examined."""
        loss = self.recording.loss
        shown = "" if loss is None else f", loss {loss:.6g}"
        return (
            f"{self.recording.framework}, {self.recording.policy}: one step in float32{shown}; "
            f"{len(self.recording.observations)} tensors, {len(self.bounding)} gradients in {self.format}"
        )

    def rows(self) -> list[tuple[str, ...]]:
        """Return the tensors that limit the window or are nearest to overflow, in the order of computation."""
        header = ("kind", "tensor", "format", "amax", "flushed", "L1 lost", "need S", "max S")
        wanted = set(map(id, self._notable()))
        named = zip(self.recording.observations, self.recording.names, strict=True)
        return [header, *(self._row(one, name) for one, name in named if id(one) in wanted)]

    def _row(self, one: Observation, name: str) -> tuple[str, ...]:
        spread, forward = one.spread, one.kind == ACTIVATION
        need = "" if forward else power(self.need(one))
        limit = f"{spread.headroom(self.format):+.1f} bits" if forward else power(spread.largest_scale(self.format))
        return (
            _KINDS[one.kind],
            name,
            one.format,
            f"{spread.largest:.2g}" if spread.is_finite else "inf" if spread.inf else "nan",
            share(spread.flushed(self.format)),
            share(spread.lost(self.format)),
            need,
            limit,
        )

    def _notable(self) -> list[Observation]:
        return [
            *sorted(self.counting, key=lambda one: (-self.need(one), -one.spread.lost(self.format)))[:10],
            *sorted(self.bounding, key=self.tolerate)[:5],
            *sorted(self._forward, key=lambda one: one.spread.headroom(self.format))[:4],
            *filter(None, [self.broken]),
        ]

    def sentences(self) -> list[str]:
        """Return which loss scales are safe, and what is wrong if none is."""
        lines = []
        if self.broken:
            lines.append(
                f"{_KINDS[self.broken.kind]} {self.broken.place} is not finite in float32 either: look at the data and "
                "the model, not at the precision."
            )
        lines += [
            f"The forward pass overflows {self.format} in {one.place} (largest {one.spread.largest:.3g}): no loss "
            "scale helps."
            for one in (makers(self.overflowing) or self.overflowing)[:3]
        ]
        if self.is_cured:
            lines.append(f"Keep it float32: rules={self.rules!r} (tried: the forward pass is then finite).")
        elif self.overflowing:
            lines.append("polyamp.diagnose tries rules.")
        if self.rounding and not self.overflowing:
            lines.append(f"Rounding to {self.format} changes the step: {self.rounding}. polyamp.diagnose tries rules.")
        return [*lines, *self._about_scales()]

    def _about_scales(self) -> list[str]:
        window = self.window
        if window is None:
            return [f"No gradient is computed in {self.format}: no loss scale is needed."]
        if not window.is_empty:
            needless = " (1 is inside: this step needs no loss scaling)" if 1.0 in window else ""
            return [
                f"safe window: {window}{needless}, with a margin of {self.margin:g} bits above the largest gradient",
                f"recommended: {written(self.recommended)}",
            ]
        needing = max(self.counting, key=self.need)
        tolerating = min(self.bounding, key=self.tolerate)
        return [
            f"No loss scale suits all gradients: {needing.place} needs {power(self.need(needing))} or more, and "
            f"{tolerating.place} tolerates {power(self.tolerate(tolerating))} at most, without the margin of "
            f"{self.margin:g} bits.",
            f"Start with {written(self.recommended)}.",
        ]


def _is_sum(one: Observation) -> bool:
    """Return whether a gradient is a sum over elements, or a sum that was only moved."""
    return one.kind == PARAMETER or one.name in _SUMS


def written(config: LossScale) -> str:
    """Return settings as source code, with powers of two written as powers."""
    settings = config.to_dict()
    if config == LossScale.skip_nonfinite():
        return "LossScale.skip_nonfinite()"
    return f"LossScale({', '.join(f'{name}={_literal(value)}' for name, value in settings.items())})"


def _literal(value: object) -> str:
    text = power(value) if isinstance(value, float) else ""
    return f"2.0**{text[2:]}" if text.startswith("2^") else repr(value)


def makers(observations: Iterable[Observation]) -> Sequence[Observation]:
    """Return the products among these operations; without products, those that are not ``keep`` or ``full``."""
    # An operation that follows a float32 operation runs in float32 without a rule.
    each = [one for one in observations if one.op_class not in ("keep", "full")]
    return [one for one in each if one.op_class == "lower"] or each


@refuses_unreadable
def probe(
    step: Any,
    /,
    *args: Any,
    policy: Policy | str | None = None,
    format: str | None = None,
    tolerance: float = TOLERANCE,
    margin: float = 3.0,
    scale: float | None = None,
    backend: str | None = None,
    **kwargs: Any,
) -> Probe:
    """Examine every tensor of one training step, computed in float32, and report which loss scales are safe in 16 bits.

    The step is also run under the policy, and its loss and tensors are compared: see ``Probe.rounding``. Rules for a
    forward pass that overflows are tried.

    >>> import jax.numpy as jnp
    >>> def loss_fn(params, x):
    ...     return ((x @ params["w"]) ** 2).mean()
    >>> report = probe(loss_fn, {"w": jnp.full((4, 2), 1e-4)}, jnp.ones((8, 4)), policy="mixed_float16")
    >>> report.window, report.recommended
    (Window(2^-3 .. 2^24), LossScale())

    Args:
        step: a function that returns the loss, which the recorder differentiates (JAX: with respect to the first
            argument); or a whole training step, recorded up to the optimizer's update; or a compiled Keras model.
            Everything that it changes is restored.
        *args: its arguments: a real batch, and in JAX the parameters.
        policy: the policy that the step will train under; None is the current policy if that computes in 16 bits, else
            ``mixed_float16``. Only tensors that it computes in 16 bits limit the loss scale.
        format: examine the same tensors for another format than the policy's compute format.
        tolerance: share of a gradient's L1 mass that may be lost below the format's range.
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
    found = Probe(recording.unscaled().by_layer(), name, tolerance, margin)
    if name != chosen.compute:
        return found
    own = scale if scale is not None or recording.differentiates else found.recommended.init
    narrow = record(step, args, kwargs, chosen, backend, widened=False, scale=own)
    changed = rounding(narrow.unscaled(), recording.unscaled(), gradients=found.suits(narrow.scale))
    found = replace(found, rounding=changed, fits=narrow.is_forward_sound)
    if found.rules:
        ruled = make_policy(chosen, rules=found.rules)
        tried = record(step, args, kwargs, ruled, backend, widened=False, scale=own)
        found = replace(found, is_cured=tried.is_forward_sound)
    return found


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
    """Record one step with its framework's adapter; see `polyamp.interface.Adapter.record`."""
    check_callable(
        step,
        where="the step",
        allowed="a function that returns the loss, a training step, or a Keras model",
        fix="give the function itself, then its arguments: polyamp.probe(loss_fn, params, batch)",
    )
    if scale is not None:
        limits = format_of("float32")
        check_range("scale", scale, limits.smallest_normal, limits.max, where="scale=")
    found = find_verb("record", backend, (step, args, kwargs), where="the step and its arguments")
    try:
        recording: Recording = found(step, args, kwargs, policy, widened=widened, scale=scale)
    except RecursionError as error:
        raise too_deep("the step and its arguments") from error
    return recording


def sixteen_bit(policy: Policy | str | None) -> Policy:
    """Return the policy to examine: the one given, else the current one if in 16 bits, else mixed_float16."""
    if policy is not None:
        return make_policy(policy)
    current = current_policy()
    return current if format_of(current.compute).is_low else make_policy("mixed_float16")
