"""The results of a session as JSON values, and a verdict if it went badly."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from polyamp import registry
from polyamp.diagnosis.health import Health, health
from polyamp.plan import Plan
from polyamp.report import finite
from polyamp.scripts.session import Session

SIXTEEN_BITS = ("float16", "bfloat16")


def summary_of(session: Session, error: BaseException | None = None) -> dict[str, Any]:
    """Return the results of a session as JSON values.

    >>> sorted(summary_of(Session()))
    ['frameworks', 'health', 'interfaces', 'loss', 'notes', 'plans', 'policy', 'refusal', 'supplied', 'verdicts']

    Args:
        session: the session, at its end.
        error: the exception that ended the script.
    """
    found = [one for one in map(_health_of, session.holders) if one is not None]
    loss = session.last_loss()
    return {
        "policy": None if session.policy is None else str(session.policy),
        "frameworks": {adapter.name: adapter.describe() for adapter in registry.in_use()},
        "supplied": sorted(set(session.supplied)),
        "interfaces": [found._asdict() for found in session.interfaces],
        "plans": [plan.as_dict() for plan in session.plans],
        "health": [{**one.as_dict(), "text": str(one)} for one in found],
        "loss": finite(loss),
        "notes": session.notes,
        "refusal": None if session.refusal is None else str(session.refusal),
        "verdicts": verdicts(session, found, loss, error),
    }


def verdicts(session: Session, found: list[Health], loss: float | None, error: BaseException | None) -> list[str]:
    """Return what went badly, as sentences; empty if nothing did.

    >>> from polyamp import policy
    >>> verdicts(Session(policy("mixed_float16")), [], None, None)
    ['No framework that polyamp supports was imported: nothing changed.']
    """
    if session.refusal is not None:
        return []
    told = [_verdict_of(one) for one in found]
    if loss is not None and not math.isfinite(loss):
        told.append(f"The last loss is {loss}: look for its first non-finite value with polyamp.diagnose.")
    if session.policy is not None and error is None:
        told.append(_change(session))
    return [one for one in dict.fromkeys(told) if one]


def _verdict_of(one: Health) -> str:
    if one.steps and one.skipped == one.steps:
        return f"All {one.steps:,} steps were skipped, so nothing was trained. {one.finding}"
    return f"Loss scaling: {one.why}. {one.finding}" if one.alarming else ""


def _change(session: Session) -> str:
    """Return the verdict about a policy that had no effect."""
    if not session.begun:
        return "No framework that polyamp supports was imported: nothing changed."
    low = session.policy is not None and session.policy.compute in SIXTEEN_BITS
    if low and not session.has_low and not any(map(_has_low, session.plans)):
        return "Nothing ran in 16 bits: nothing changed. The report shows which operations were seen."
    return ""


def _has_low(plan: Plan) -> bool:
    return any(plan.totals["by_format"].get(name) for name in SIXTEEN_BITS)


def formats_of(plan: dict[str, Any]) -> list[tuple[str, dict[str, int]]]:
    """Return the operations of a plan's JSON by name, each with its counts by format, the most frequent ones first.

    >>> formats_of({"operations": [{"name": "matmul", "format": "float16"}]})
    [('matmul', {'float16': 1})]
    """
    counted: dict[str, Counter[str]] = {}
    for one in plan["operations"]:
        counted.setdefault(one["name"], Counter())[one["format"]] += 1
    return sorted(((name, dict(formats)) for name, formats in counted.items()), key=lambda item: -sum(item[1].values()))


def _health_of(holder: Any) -> Health | None:
    holder = holder() if callable(holder) and not hasattr(holder, "step") else holder
    return None if holder is None else health(holder)
