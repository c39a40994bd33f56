"""The verbs of `polyamp` on PyTorch's modules and functions: `rewrite` and `explain`, with arguments in a tuple."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyamp.backends.torch.graphs.explain import explain as explain_module
from polyamp.backends.torch.graphs.rewrite import rewrite as rewrite_module
from polyamp.plan import Plan
from polyamp.policies import Policy


def rewrite(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy) -> Any:
    """Return a module as a graph with explicit casts; see `polyamp.backends.torch.rewrite`."""
    return rewrite_module(fn, *args, policy=policy, **kwargs)


def explain(
    fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, *, engine: str | None = None
) -> Plan:
    """Return the plan of a module; see `polyamp.backends.torch.explain`."""
    return explain_module(fn, *args, policy=policy, engine=engine, **kwargs)
