"""Warnings about the parts of a policy that had no effect: one text for all frameworks, each shown once.

Each function takes ``where``, the name of the function, model or region, and ``stacklevel`` as in `warnings.warn`,
counted from the function itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from polyamp.errors import warn_once
from polyamp.policies import Policy, current_policy, in_policy
from polyamp.rules import Rule

NO_PRODUCTS = "it has no float32 operation of class lower, such as matmul and conv"
"""The usual reason why nothing was lowered."""


def chosen_policy(policy: Policy | None, call: str, *, stacklevel: int = 2) -> Policy:
    """Return a policy, or else the current one; warn once if nobody chose that one and it changes nothing."""
    chosen = current_policy() if policy is None else policy
    if policy is None and not in_policy() and not chosen.casts:
        verb = call.partition("(")[0]
        warn_once(
            f"{call} without a policy takes the current one, {chosen}, which changes nothing: pass a policy, as in "
            f"{_WITH_POLICY[verb]}, or call polyamp.set_global_policy first.",
            stacklevel=stacklevel + 1,
        )
    return chosen


_WITH_POLICY = {
    "autocast": 'polyamp.autocast("mixed_float16")',
    "rewrite": 'polyamp.rewrite(fn, policy="mixed_float16")',
    "value_and_grad": 'polyamp.value_and_grad(fun, "mixed_float16")',
    "torch.compile": 'options={"policy": "mixed_float16"}',
}


def report_unused(rules: Iterable[Rule], *, where: str, paths: str, of: object = "", stacklevel: int = 2) -> None:
    """Warn of each rule that matched nothing."""
    for rule in rules:
        warn_once(
            f"the rule {rule.pattern!r}{of and f' of {of}'} matched nothing in {where}: it names neither an operation "
            f"(see docs/operations.md) nor {paths} there. polyamp.explain lists what there is.",
            stacklevel=stacklevel + 1,
        )


def report_nothing_lowered(
    verb: str, compute: str, *, where: str, why: str = NO_PRODUCTS, remedy: str = "", stacklevel: int = 2
) -> None:
    """Warn that a program runs as it did before."""
    remedy = remedy or "polyamp.explain shows the reason for each operation."
    warn_once(f"{verb} to {compute} changed nothing in {where}: {why}. {remedy}", stacklevel=stacklevel + 1)


def report_refused(refused: Mapping[str, str], *, where: str, of: object, stacklevel: int = 2) -> None:
    """Warn of each rule that no kernel can follow."""
    for missing, rule in refused.items():
        warn_once(f"{rule} of {of} has no effect in {where}: {missing}.", stacklevel=stacklevel + 1)
