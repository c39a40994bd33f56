"""Restore moving averages, such as batch normalisation's statistics, when a step is skipped.

In a step that overflows, the batch's statistics may be inf or NaN, and an average that takes one in never recovers.

For example, a write of ``moving_mean`` gets four nodes: a read before it, and, after everything that uses the variable,
a second read, a selection of the old or the new value by the scalar that decides about the step, and a write.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from polyamp.adapter import FINITE
from polyamp.backends.tensorflow.graphs.graph import Graph, Node, NodeDef

_DECISION = re.compile(rf"(.*/)?{FINITE}(_\d+)?")


def decisions_of(graph: Graph) -> list[Node]:
    """Return the scalars that decide whether a step is applied, found by the name that wrapped optimizers give them."""
    return [node for node in graph.nodes if node.op == "Identity" and _DECISION.fullmatch(node.name)]


def guarded(graph: Graph, averages: Sequence[Node], decided: Sequence[Node], written: Sequence[Any]) -> list[Any]:
    """Add nodes to a function that restore old averages after a skipped step."""
    added = _all_of([node.outputs[0] for node in decided])
    applied = decided[0].outputs[0] if not added else f"{added[-1].name}:z:0"
    by_name: Mapping[str, Any] = {node.name: node for node in written}
    first = {average.inputs[0]: average for average in reversed(averages)}  # a layer may be called several times
    for handle, average in first.items():
        before = _read(f"{average.name}/polyamp_before", handle, average.controls, average)
        by_name[average.name].input.append(f"^{before.name}")
        users = [node.name for node in graph.nodes if handle in node.inputs]
        added += [before, *_restoring(average, handle, applied, users)]
    return added


def _read(name: str, handle: str, controls: Sequence[str], average: Node) -> Any:
    node = NodeDef(name=name, op="ReadVariableOp", input=[handle, *(f"^{one}" for one in controls)])
    node.device, node.attr["dtype"].type = average.definition.device, average.input_ports[1].dtype
    return node


def _restoring(average: Node, handle: str, applied: str, users: Sequence[str]) -> list[Any]:
    """Return nodes that run after all uses of a variable and restore its old value, unless the step was applied."""
    name, device = average.name, average.definition.device
    after = _read(f"{name}/polyamp_after", handle, users, average)
    values = [applied, f"{after.name}:value:0", f"{name}/polyamp_before:value:0"]
    chosen = NodeDef(name=f"{name}/polyamp_chosen", op="SelectV2", input=values, device=device)
    restored = NodeDef(name=f"{name}/polyamp_restored", op="AssignVariableOp", device=device)
    restored.input.extend([handle, f"{chosen.name}:output:0"])
    chosen.attr["T"].type = restored.attr["dtype"].type = average.input_ports[1].dtype
    return [after, chosen, restored]


def _all_of(values: Sequence[str]) -> list[Any]:
    """Return nodes; the last one computes whether all of several scalars are true. No nodes for a single scalar."""
    nodes: list[Any] = []
    for value in values[1:]:
        first = f"{nodes[-1].name}:z:0" if nodes else values[0]
        nodes.append(NodeDef(name=f"polyamp_all_applied_{len(nodes)}", op="LogicalAnd", input=[first, value]))
    return nodes


def must_run(nodes: Sequence[Any]) -> list[str]:
    """Return the names of the added nodes that have effects."""
    return [node.name for node in nodes if node.name.endswith("/polyamp_restored")]
