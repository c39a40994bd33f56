"""Decide a whole program: a traced function or a ``GraphDef``, with all functions that it calls.

The pass over a program is repeated until the contents of its lists are known; see `lists`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from polyamp.backends.tensorflow.graphs.decisions import Pass, Rules
from polyamp.backends.tensorflow.graphs.functions import REWRITTEN, Functions
from polyamp.backends.tensorflow.graphs.graph import Graph
from polyamp.backends.tensorflow.graphs.kernels import device_of
from polyamp.backends.tensorflow.graphs.refusals import check_graph
from polyamp.backends.tensorflow.graphs.values import Known, value_of_capture, value_of_type
from polyamp.backends.tensorflow.unstable import FunctionLibrary
from polyamp.formats import format_of
from polyamp.policies import Policy

_PASSES = 5  # more than one, because a list may hold values from another list


def decided_for(concrete: Any, policy: Policy, *, fuses: bool = True) -> Pass:
    """Return the decisions for a ``ConcreteFunction`` under a policy."""
    rules, library = Rules(policy, fuses=fuses), FunctionLibrary()
    graph = Graph.of_function(concrete.function_def, library)
    arguments, traced = _arguments(graph, concrete.captured_inputs, rules), concrete.graph
    return _settled(rules, lambda: Pass(graph, rules, Functions(library, rules, traced), arguments, traced=traced))


def decided_graph(graph_def: Any, policy: Policy) -> Pass:
    """Return the decisions for a ``GraphDef`` under a policy."""
    check_graph(graph_def)
    rules, library = Rules(policy), {function.signature.name: function for function in graph_def.library.function}
    graph = Graph(graph_def.node, library)
    return _settled(rules, lambda: Pass(graph, rules, Functions(library, rules)))


def lowered_in(decisions: Pass) -> set[tuple[str, str]]:
    """Return the operations of class ``lower`` that run in the compute format, each with its type of device."""
    found = {pair for decided in decisions.nodes for inside in decided.inside for pair in lowered_in(inside.decisions)}
    is_low = format_of(decisions.rules.compute).is_low
    return found | {
        (decided.operation, device_of(decided.node))
        for decided in decisions.nodes
        if is_low and decided.decision.op_class == "lower" and decided.outcome.format == decisions.rules.compute
    }


def lowers(decisions: Pass) -> bool:
    """Return whether any operation runs in the compute format, or was rewritten to it before."""
    return any(
        decided.outcome.format == decisions.rules.compute
        or decided.outcome.reason == REWRITTEN
        or any(lowers(inside.decisions) for inside in decided.inside)
        for decided in decisions.nodes
    )


def _settled(rules: Rules, decide: Callable[[], Pass]) -> Pass:
    """Repeat a pass until the contents of lists are known; after any number of passes the result is consistent."""
    decisions = decide()
    for _ in range(_PASSES - 1):
        rules.lists.keep(decisions.known[value].held for value in decisions.graph.returns)
        if not rules.lists.settle():
            break
        decisions = decide()
    return decisions


def _arguments(graph: Graph, captures: Sequence[Any], rules: Rules) -> list[Known]:
    """Return the facts about a program's arguments; the last of them are captured values."""
    types = [dtype for _, dtype in graph.arguments]
    own = len(types) - len(captures)
    known = [Known(dtype, value_of_type(dtype)) for dtype in types[:own]]
    pairs = zip(types[own:], captures, strict=True)
    return [*known, *(Known(dtype, *value_of_capture(tensor, rules.decider)) for dtype, tensor in pairs)]
