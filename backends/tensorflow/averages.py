"""Keeps moving averages, such as batch normalisation's statistics, as they were when a step is skipped.

In a step that overflows the batch's statistics may be inf or NaN, and an average that takes one in never recovers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from polyamp.backends.tensorflow.graph import FLOAT32, Graph, Node, NodeDef
from polyamp.markers import FINITE

_DECISION = re.compile(rf"(.*/)?{FINITE}(_\d+)?")
_FACTORS = ("Mul", "MulNoNan", "RealDiv", "Div")
_READ = "ReadVariableOp"


def moving_averages(graph: Graph, region: set[str]) -> list[Node]:
    """The assignments, outside of the update, of what a variable held before times a factor, plus something new."""
    assigns = {"AssignVariableOp": True, "AssignAddVariableOp": False, "AssignSubVariableOp": False}
    found = (node for node in graph.nodes if node.op in assigns and node.name not in region)
    return [node for node in found if _is_average(graph, node, with_factor=assigns[node.op])]


def decisions_of(graph: Graph) -> list[Node]:
    """The scalars that say whether a step is applied, as wrapped optimizers name them."""
    return [node for node in graph.nodes if node.op == "Identity" and _DECISION.fullmatch(node.name)]


def guarded(graph: Graph, averages: Sequence[Node], decided: Sequence[Node], written: Sequence[Any]) -> list[Any]:
    """Add to a function's nodes what puts old averages back after a step that is skipped.

    Args:
        graph: the function's body, as it was.
        averages: what `moving_averages` found.
        decided: what `decisions_of` found; at least one.
        written: ``NodeDef`` of the body, as it will be; the averages' change.

    Returns:
        New nodes; see `must_run`.
    """
    added = _all_of([node.outputs[0] for node in decided])
    applied = decided[0].outputs[0] if not added else f"{added[-1].name}:z:0"
    by_name: Mapping[str, Any] = {node.name: node for node in written}
    for average in averages:
        handle = average.inputs[0]
        before = _read(f"{average.name}/polyamp_before", handle, average.controls, average)
        by_name[average.name].input.append(f"^{before.name}")
        users = [node.name for node in graph.nodes if handle in node.inputs]
        added += [before, *_restoring(average, handle, applied, users)]
    return added


def _is_average(graph: Graph, node: Node, *, with_factor: bool) -> bool:
    handle, value = node.inputs[:2]
    if node.takes[1].dtype != FLOAT32:
        return False
    return any(factor or not with_factor for factor in _ways_to(graph, value, handle))


def _ways_to(graph: Graph, value: str, handle: str) -> Iterator[bool]:
    """For each way from a value back to a read of a variable: whether a factor lies on it."""
    pending, seen = [(value, False)], set()
    while pending:
        now = pending.pop()
        maker = graph.maker.get(now[0])
        if maker is None or now in seen:
            continue
        seen.add(now)
        if maker.op == _READ and maker.inputs[0] == handle:
            yield now[1]
        pending.extend((one, now[1] or maker.op in _FACTORS) for one in maker.inputs)


def _read(name: str, handle: str, controls: Sequence[str], average: Node) -> Any:
    node = NodeDef(name=name, op=_READ, input=[handle, *(f"^{one}" for one in controls)])
    node.device, node.attr["dtype"].type = average.definition.device, FLOAT32
    return node


def _restoring(average: Node, handle: str, applied: str, users: Sequence[str]) -> list[Any]:
    """Once all that uses a variable has run: put back what it held before, unless the step was applied."""
    name, device = average.name, average.definition.device
    after = _read(f"{name}/polyamp_after", handle, users, average)
    values = [applied, f"{after.name}:value:0", f"{name}/polyamp_before:value:0"]
    chosen = NodeDef(name=f"{name}/polyamp_chosen", op="SelectV2", input=values, device=device)
    restored = NodeDef(name=f"{name}/polyamp_restored", op="AssignVariableOp", device=device)
    restored.input.extend([handle, f"{chosen.name}:output:0"])
    chosen.attr["T"].type = restored.attr["dtype"].type = FLOAT32
    return [after, chosen, restored]


def _all_of(values: Sequence[str]) -> list[Any]:
    """Nodes of which the last says whether all of several scalars hold; none where there is one scalar alone."""
    nodes: list[Any] = []
    for value in values[1:]:
        first = f"{nodes[-1].name}:z:0" if nodes else values[0]
        nodes.append(NodeDef(name=f"polyamp_all_applied_{len(nodes)}", op="LogicalAnd", input=[first, value]))
    return nodes


def must_run(nodes: Sequence[Any]) -> list[str]:
    """Names of the added nodes that have effects."""
    return [node.name for node in nodes if node.name.endswith("/polyamp_restored")]
