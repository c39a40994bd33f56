"""The verbs of `polyamp` on TensorFlow's functions and graphs: `rewrite` and `explain`, with arguments in a tuple."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyamp.backends.tensorflow.graphs import rewrite as graphs
from polyamp.plan import Plan
from polyamp.policies import Policy
from polyamp.validation import check_options


def rewrite(
    fn: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    policy: Policy,
    *,
    jit_compile: bool | None = None,
) -> Any:
    """Return a rewritten function, or a rewritten ``GraphDef``; see `polyamp.backends.tensorflow.rewrite`."""
    if callable(fn):
        return graphs.rewrite(fn, *args, policy=policy, jit_compile=jit_compile, **kwargs)
    if jit_compile is not None:
        check_options(graphs.rewritten_graph, {"jit_compile": jit_compile}, where="rewrite(graph_def)")
    return graphs.rewritten_graph(fn, policy)


def explain(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy) -> Plan:
    """Return the plan of a function or a ``GraphDef``; see `polyamp.backends.tensorflow.explain`."""
    return graphs.explain(fn, *args, policy=policy, **kwargs)
