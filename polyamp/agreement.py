"""Whether an optimizer and the forward pass agree: each gets a policy separately, so a policy can be forgotten.

For example, this trains in float16 without a loss scale::

    opt = polyamp.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))  # the current policy: no scaling
    with polyamp.autocast("mixed_float16"):
        loss = model(x).mean()
    opt.backward(loss)
    opt.step()  # at the second step a warning: nobody chose a policy, so nothing is scaled or checked
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from polyamp.errors import warn_once
from polyamp.formats import format_of
from polyamp.policies import Policy, current_policy, in_policy
from polyamp.settings import LossScale


class OfPolicy:
    """The base class of scalers, which may have a policy."""

    policy: Policy | None  # None if nobody chose one

    @property
    def compute(self) -> str | None:
        """The format that forward passes compute in, as far as the policy tells."""
        return None if self.policy is None else self.policy.compute


def report_disagreement(
    own: Policy | None, forward: Policy | None, settings: LossScale, *, in_float32: str = ""
) -> None:
    """Warn once where the policies of an optimizer and of the forward pass lose accuracy or speed together.

    Args:
        own: the optimizer's policy; None if nobody chose one.
        forward: the policy of the forward pass; if None, that of the rewrite that traces the caller, else of the region
            around the caller, else unknown.
        settings: the optimizer's loss scale.
        in_float32: if the forward pass computed in float32 alone, a text of why and what to do; else empty.
    """
    forward = forward or _traced_for.get() or (current_policy() if in_policy() else None)
    if own is None:
        if not settings.check and (forward is None or forward.casts):
            warn_once(
                "the optimizer was wrapped without a policy, so nothing is scaled or checked: pass that of the forward "
                'pass, as in polyamp.wrap_optimizer(optimizer, "mixed_float16").',
            )
    elif in_float32:
        if format_of(own.compute).is_low:
            warn_once(f"the optimizer was wrapped for {own.compute}, and {in_float32}")
    elif forward is None or forward.compute == own.compute or settings.scales:
        return  # two different 16-bit formats with a loss scale train correctly
    elif forward.compute == "float16" and forward.loss_scale.scales:
        warn_once(
            "the forward pass computes in float16, and the optimizer was wrapped without a loss scale. What to do: "
            f"call polyamp.wrap_optimizer(optimizer, policy) with {forward}: else small gradients round to zero.",
        )


_traced_for: ContextVar[Policy | None] = ContextVar("polyamp_traced_for", default=None)


@contextmanager
def traced_for(policy: Policy) -> Iterator[None]:
    """Mark code traced in this block as code that will be rewritten, and so run, under ``policy``."""
    token = _traced_for.set(policy)
    try:
        yield
    finally:
        _traced_for.reset(token)


def is_rewritten() -> bool:
    """Return whether the calling code is traced to be rewritten; the rewrite then tests how the loss is scaled."""
    return _traced_for.get() is not None
