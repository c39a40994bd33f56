"""Warnings about a policy without effect: forgotten, or one that changes nothing in a program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from polyamp.errors import warn_once
from polyamp.policies import Policy, current_policy, in_policy
from polyamp.rules import Rule


def chosen_policy(policy: Policy | None, call: str) -> Policy:
    """Return ``policy`` or else the current one; warn once if nobody chose the current one and it changes nothing."""
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
    """Warn that a policy lowered nothing in a program, and why."""
    warn_once(
        f"{verb} to {compute} changed nothing in {where}: {why}. polyamp.explain shows the reason for each operation."
    )


def report_refused(refused: Mapping[str, str], *, where: str, of: object) -> None:
    """Warn of each rule that no kernel can follow."""
    for missing, rule in refused.items():
        warn_once(f"{rule} of {of} has no effect in {where}: {missing}.")
