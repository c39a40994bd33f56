"""Warnings about a policy without effect: forgotten, or one that changes nothing in a program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from polyamp.errors import warn_once
from polyamp.policies import Policy, current_policy, in_policy
from polyamp.rules import Rule
from polyamp.settings import LossScale


def chosen_policy(policy: Policy | None, call: str) -> Policy:
    """Return a policy, or else the current one; warn once if nobody chose that one and it changes nothing."""
    chosen = current_policy() if policy is None else policy
    if policy is None and not in_policy() and not chosen.casts:
        verb = call.partition("(")[0]
        warn_once(
            f"{call} without a policy takes the current one, {chosen}, which changes nothing: pass a policy, as in "
            f"{_WITH_POLICY[verb]}, or call polyamp.set_global_policy first.",
        )
    return chosen


_WITH_POLICY = {
    "autocast": 'polyamp.autocast("mixed_float16")',
    "rewrite": 'polyamp.rewrite(fn, policy="mixed_float16")',
    "value_and_grad": 'polyamp.value_and_grad(fun, "mixed_float16")',
}


NO_PRODUCTS = "it has no float32 operation of class lower, such as matmul and conv"
"""The usual reason why nothing was lowered."""


def report_unused(rules: Iterable[Rule], *, where: str, paths: str, of: object = "") -> None:
    """Warn of each rule that matched nothing."""
    for rule in rules:
        warn_once(
            f"the rule {rule.pattern!r}{of and f' of {of}'} matched nothing in {where}: it names neither an operation "
            f"(see docs/operations.md) nor {paths} there. polyamp.explain lists what there is.",
        )


def report_nothing_lowered(verb: str, compute: str, *, where: str, why: str = NO_PRODUCTS) -> None:
    """Warn that a program runs as it did before."""
    warn_once(
        f"{verb} to {compute} changed nothing in {where}: {why}. polyamp.explain shows the reason for each operation."
    )


def report_refused(refused: Mapping[str, str], *, where: str, of: object) -> None:
    """Warn of each rule that no kernel can follow."""
    for missing, rule in refused.items():
        warn_once(f"{rule} of {of} has no effect in {where}: {missing}.")


# --- an optimizer that was wrapped for another policy -----------------------------------------------------------------
#
# An optimizer and the code around the forward pass get their policies separately, so one of them can be forgotten::
#
#     opt = polyamp.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))  # the current policy: no scaling
#     with polyamp.autocast("mixed_float16"):
#         loss = model(x).mean()
#     opt.backward(loss)
#     opt.step()  # a warning: without a loss scale, small float16 gradients round to zero


def report_missing_scale(settings: LossScale, compute: str | None, forward: Policy | None = None) -> None:
    """Warn once if a forward pass needs a loss scale, and its optimizer was wrapped for another format, without one."""
    # Without a policy of the forward pass, it is that of the rewrite that traces the caller, or else of the region
    # around the caller; without either, nothing is checked. Two different 16-bit formats with a loss scale train
    # correctly.
    forward = forward or _traced_for.get() or (current_policy() if in_policy() else None)
    if forward is None or compute in (None, forward.compute) or settings.scales:
        return
    if forward.compute == "float16" and forward.loss_scale.scales:
        warn_once(
            "the forward pass computes in float16, and the optimizer was wrapped without a loss scale. What to do: "
            f"call polyamp.wrap_optimizer(optimizer, policy) with {forward}: else small gradients round to zero.",
        )


def report_no_policy() -> None:
    """Warn once that an optimizer does nothing, since nobody chose the policy that it was wrapped for."""
    warn_once(
        "the optimizer was wrapped without a policy, so nothing is scaled or checked: pass one, as in "
        'polyamp.wrap_optimizer(optimizer, "mixed_float16").',
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


def is_rewritten() -> bool:
    """Return whether the caller is traced to be rewritten; the rewrite then tests how its loss is scaled."""
    return _traced_for.get() is not None
