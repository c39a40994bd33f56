"""The verbs of `polyamp` on PyTorch's modules and functions: `rewrite` and `explain`, with arguments in a tuple."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyamp.backends.torch.graphs import rewrite as graphs
from polyamp.plan import Plan
from polyamp.policy import Policy


def rewrite(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy) -> Any:
    """Return a module as a graph with explicit casts; see `polyamp.backends.torch.rewrite`."""
    return graphs.rewrite(fn, *args, policy=policy, **kwargs)


def explain(
    fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, *, engine: str | None = None
) -> Plan:
    """Return the plan of a module; see `polyamp.backends.torch.explain`."""
    return graphs.explain(fn, *args, policy=policy, engine=engine, **kwargs)
