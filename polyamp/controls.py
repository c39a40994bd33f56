"""Negative controls: mixed precision broken on purpose, to see whether a training task can tell.

A task on which even broken training reaches the same metric proves nothing about a policy. Two ways to break it, both
from Micikevicius et al., "Mixed Precision Training", ICLR 2018: no loss scaling (section 3.2), so that small gradients
become zero in float16; and weights stored in 16 bits (section 3.1), so that updates below half a unit in the last place
of their weight are lost. For example, with a weight of 1.0 stored in float16, every update below 2**-11 is lost.

A control is ambient. What wraps an optimizer inside the block of `broken` calls `imposed`, once, for the settings that
it shall use; the user's code stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import TypeVar

from polyamp.formats import format_of
from polyamp.loss_scale import LossScale
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy


@dataclass(frozen=True)
class Control:
    """One way to break mixed precision."""

    name: str  # its name in reports
    # replaces the loss scale of every optimizer, also one that the user passed; None keeps it
    loss_scale: LossScale | None = None
    # the format that parameters are rounded to after every update, to nearest even, as if they were stored in it
    # without master weights; None does not round
    update_format: str | None = None


@dataclass(frozen=True)
class BrokenPolicy(Policy):
    """A policy under a control. It equals no other one, so a step that is compiled once per policy is compiled anew."""

    control: str = ""  # the control's name


@dataclass
class Tally:
    """A count of the optimizers and loss scalers that a control reached."""

    # how many were made in the block and are broken by the control; if 0, the control was not in effect
    reached: int = 0


Given = TypeVar("Given", bound=LossScale | None)

_ACTIVE: ContextVar[tuple[Control, Tally] | None] = ContextVar("polyamp_control", default=None)


def for_policy(policy: Policy | str | None) -> tuple[Control, ...]:
    """Return the controls that should make training under a policy worse; none if it computes in 32 bits or more."""
    compute = make_policy(policy).compute
    if format_of(compute).bits != 16:
        return ()
    rounded = Control("16-bit updates", update_format=compute)
    return (Control("no loss scaling", LossScale.fixed(1)), rounded) if compute == "float16" else (rounded,)


def policy_under(policy: Policy, control: Control) -> Policy:
    """Return the policy to train with under a control."""
    parts = {part.name: getattr(policy, part.name) for part in fields(policy)}
    return BrokenPolicy(**{**parts, "loss_scale": control.loss_scale or policy.loss_scale}, control=control.name)


@contextmanager
def broken(control: Control) -> Iterator[Tally]:
    """Impose a control on every optimizer that is wrapped in the block, and count these."""
    # Blocks can be nested: the innermost control is in effect. Threads that start in the block do not see it.
    tally = Tally()
    token = _ACTIVE.set((control, tally))
    try:
        yield tally
    finally:
        _ACTIVE.reset(token)


def active() -> Control | None:
    """Return the control of the innermost block, or None."""
    found = _ACTIVE.get()
    return None if found is None else found[0]


def scale_in_effect(given: Given) -> Given | LossScale:
    """Return the loss scale of the control in effect, or the given one: for scales that several optimizers share."""
    control = active()
    return given if control is None or control.loss_scale is None else control.loss_scale


def imposed(given: Given, *, rounds: bool = True) -> tuple[Given | LossScale, str | None]:
    """Return the loss scale that an optimizer shall use, and the format its updates are rounded to or None."""
    # Adapters call it once for every optimizer or loss scaler that they make, and it is counted as reached.
    found = _ACTIVE.get()
    if found is None:
        return given, None
    control, tally = found
    if control.update_format is not None and not rounds:
        return given, None
    tally.reached += 1
    return scale_in_effect(given), control.update_format
