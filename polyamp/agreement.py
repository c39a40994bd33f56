"""Whether an optimizer was wrapped for the policy that the forward pass computes in: one check for all frameworks.

An optimizer and the code around the forward pass get their policies separately, so one of them can be forgotten::

    opt = polyamp.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))  # the current policy, float32: no scaling
    with polyamp.autocast("mixed_float16"):
        loss = model(x).mean()
    opt.backward(loss)
    opt.step()  # a warning: without a loss scale, small float16 gradients round to zero

Training then goes on, and learns less or nothing. An adapter calls `report_missing_scale` where it knows both policies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from polyamp.errors import warn_once
from polyamp.loss_scale import LossScale
from polyamp.policies import Policy, current_policy, in_policy


def report_missing_scale(
    settings: LossScale, compute: str | None, forward: Policy | None = None, *, stacklevel: int = 2
) -> None:
    """Warn once if the forward pass needs a loss scale and the optimizer was wrapped for another format, without one.

    Two different 16-bit formats with a loss scale train correctly.

    Args:
        settings: the optimizer's loss scale.
        compute: the compute format that it was wrapped for.
        forward: the policy of the forward pass. None is the policy of the rewrite that traces the caller, or else of
            the region around the caller; without either, nothing is checked.
        stacklevel: as in `warnings.warn`, counted from this function.
    """
    forward = forward or _traced_for.get() or (current_policy() if in_policy() else None)
    if forward is None or compute in (None, forward.compute) or settings.check:
        return
    if forward.compute == "float16" and forward.loss_scale.check:
        warn_once(
            "the forward pass computes in float16, and the optimizer was wrapped without a loss scale. What to do: "
            f"call polyamp.wrap_optimizer(optimizer, policy) with {forward}: else small gradients round to zero.",
            stacklevel=stacklevel + 1,
        )


_traced_for: ContextVar[Policy | None] = ContextVar("polyamp_traced_for", default=None)


@contextmanager
def traced_for(policy: Policy) -> Iterator[None]:
    """Trace the code in this block to rewrite it under a policy: its forward pass will compute in that policy."""
    token = _traced_for.set(policy)
    try:
        yield
    finally:
        _traced_for.reset(token)
