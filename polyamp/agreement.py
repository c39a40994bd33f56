"""Whether an optimizer was wrapped for the policy that the forward pass computes in: one check for all frameworks.

An optimizer and the code around the forward pass get their policies separately, so one of them can be forgotten::

    opt = polyamp.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))  # the current policy, float32: no scaling
    with polyamp.autocast("mixed_float16"):
        loss = model(x).mean()
    opt.backward(loss)
    opt.step()  # a warning: without a loss scale, small float16 gradients round to zero

Training then goes on, and learns less or nothing. An adapter calls `report_missing_scale` where it knows both policies.
`polyamp.lint` reports that and every other `disagreement`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from polyamp.errors import warn_once
from polyamp.formats import format_of
from polyamp.loss_scale import LossScale
from polyamp.policies import Policy, current_policy, in_policy


class Disagreement(NamedTuple):
    """How an optimizer and a forward pass differ, and what to do."""

    what: str
    fix: str


def disagreement(settings: LossScale, compute: str | None, forward: Policy) -> Disagreement | None:
    """Return how an optimizer and a forward pass disagree; None if they agree, or if that is not known."""
    # Float32 next to 16 bits is a disagreement only if a loss scale is missing.
    if compute is None or compute == forward.compute:
        return None
    if missing := _missing_scale(settings, forward):
        return missing
    if format_of(compute).is_low and format_of(forward.compute).is_low:
        return Disagreement(
            f"the forward pass computes in {forward.compute}, and the optimizer was wrapped for {compute}",
            "give one policy to polyamp.wrap_optimizer and to the forward pass",
        )
    return None


def _missing_scale(settings: LossScale, forward: Policy) -> Disagreement | None:
    if forward.compute == "float16" and forward.loss_scale.check and not settings.check:
        return Disagreement(
            "the forward pass computes in float16, and the optimizer was wrapped without a loss scale",
            f"call polyamp.wrap_optimizer(optimizer, policy) with {forward}: else small gradients round to zero",
        )
    return None


def report_missing_scale(
    settings: LossScale, compute: str | None, forward: Policy | None = None, *, stacklevel: int = 2
) -> None:
    """Warn once if the forward pass needs a loss scale and the optimizer was wrapped for another format, without one.

    Two different 16-bit formats with a loss scale train correctly, so only `polyamp.lint` reports them.

    Args:
        settings: the optimizer's loss scale.
        compute: the compute format that it was wrapped for.
        forward: the policy of the forward pass. None is the policy of the rewrite that traces the caller, or else of
            the region around the caller; without either, nothing is checked.
        stacklevel: as in `warnings.warn`, counted from this function.
    """
    forward = forward or _traced_for.get() or (current_policy() if in_policy() else None)
    if forward is None or compute in (None, forward.compute):
        return
    if found := _missing_scale(settings, forward):
        warn_once(f"{found.what}. What to do: {found.fix}.", stacklevel=stacklevel + 1)


_traced_for: ContextVar[Policy | None] = ContextVar("polyamp_traced_for", default=None)


@contextmanager
def traced_for(policy: Policy) -> Iterator[None]:
    """Trace the code in this block to rewrite it under a policy: its forward pass will compute in that policy."""
    token = _traced_for.set(policy)
    try:
        yield
    finally:
        _traced_for.reset(token)
