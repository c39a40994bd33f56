"""The parts of a training step: its backward pass, its update, and its moving averages.

The update and the averages keep state and are never lowered. Unscaling, clipping and the optimizer's arithmetic handle
numbers far smaller than float16 holds, and a moving average changes by so little that in 16 bits it would not change.

In a step that overflows, the batch's statistics may be inf or NaN, and an average that takes one in never recovers, so
averages are restored where a wrapped optimizer skips the step. For example, a write of ``moving_mean`` gets four nodes:
a read before it, and, after everything that uses the variable, a second read, a selection of the old or the new value
by the scalar that decides about the step, and a write.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from polyamp.backends.tensorflow.graphs.graph import (
    FINITE,
    FLOATING,
    READS,
    UPDATE_SCOPE,
    Graph,
    Node,
    NodeDef,
    closure,
    is_gradient,
    maker_name,
)

_WRITES = re.compile(r"(Assign|ResourceApply|ResourceSparseApply|ResourceScatter|Apply|SparseApply|Scatter).*")
_FACTORS = ("Mul", "MulNoNan", "RealDiv", "Div")


class Parts(NamedTuple):
    """The parts of a training step in a graph."""

    update: set[str]  # names of the nodes that update trained variables
    # names of the nodes outside the update that are between a read and a write of the same variable
    averaging: set[str]
    averages: list[Node]  # the writes of moving averages: a variable's old value times a factor, plus something new
    # names of the nodes of the backward pass: those that compute gradients, and those that follow them
    backward: set[str]


def parts_of(graph: Graph, library: Mapping[str, Any]) -> Parts:
    """Return the parts of a step."""
    # These nodes are in the update: those in the scope of a wrapped optimizer; those that follow a gradient and that no
    # gradient follows; and those that follow reads of the update's own state, such as momentum.
    gradients = {node.name for node in graph.nodes if _computes_gradient(node, library)}
    marked = {node.name for node in graph.nodes if UPDATE_SCOPE in node.name.split("/")}
    consumers = graph.consumers()
    before = _reaching(graph, gradients | marked) - marked
    backward = _after(consumers, gradients)
    update = marked | (backward - gradients - before)
    while state := _state_reads(graph, update, before):
        update |= state | (_after(consumers, state) - gradients - before)
    update |= _sums_of_gradients(graph, update, consumers)
    paths = {
        node: _paths(graph, node, before, consumers)
        for node in graph.nodes
        if _writes_number(node) and node.name not in update
    }
    averages = [node for node, path in paths.items() if path and _is_average(node, path)]
    return Parts(update, {one.name for path in paths.values() for one in path}, averages, backward)


def _computes_gradient(node: Node, library: Mapping[str, Any]) -> bool:
    """Return whether a node computes gradients, and is not a list that a loop fills for them."""
    if is_gradient(node.name):
        return any(port.dtype in FLOATING for port in node.output_ports)
    attributes = node.definition.attr
    names = [attributes[key].func.name for key in ("f", "body", "then_branch") if key in attributes]
    return any("__backward_" in name or _returns_gradient(library.get(name)) for name in names)


def _returns_gradient(function: Any) -> bool:
    """Return whether the results of a ``FunctionDef`` are made from gradients."""
    if function is None:
        return False
    # A control input has no value.
    inputs = {one.name: [maker_name(text) for text in one.input if text[0] != "^"] for one in function.node_def}
    found = closure(map(maker_name, function.ret.values()), lambda name: inputs.get(name, []))
    return any(is_gradient(name) for name in found)


def _after(consumers: Mapping[str, list[Node]], start: Iterable[str]) -> set[str]:
    return closure(start, lambda name: (node.name for node in consumers[name]))


def _reaching(graph: Graph, goals: set[str]) -> set[str]:
    nodes = {node.name: node for node in graph.nodes} if goals else {}
    return closure(goals, lambda name: (node.name for node in _made_by(graph, nodes[name])))


def _made_by(graph: Graph, node: Node) -> list[Node]:
    return [graph.maker[value] for value in node.inputs if value in graph.maker]


def _state_reads(graph: Graph, update: set[str], before: set[str]) -> set[str]:
    """Return nodes outside the update that read variables which only the update uses."""
    writes = (node for node in graph.nodes if node.name in update and _WRITES.fullmatch(node.op))
    handles = {value for node in writes for value in node.inputs[:1]}
    if not handles:
        return set()
    own = handles - {value for node in graph.nodes if node.name in before for value in node.inputs}
    others = (node for node in graph.nodes if node.name not in update and node.name not in before)
    return {node.name for node in others if not own.isdisjoint(node.inputs)}


def _sums_of_gradients(graph: Graph, update: set[str], consumers: Mapping[str, list[Node]]) -> set[str]:
    """Return sums of one parameter's gradients. A parameter with many uses has many terms, too many for 16 bits."""
    sums = (node for node in graph.nodes if node.op in ("AddN", "AddV2", "Add") and is_gradient(node.name))
    return {
        node.name for node in sums if consumers[node.name] and all(one.name in update for one in consumers[node.name])
    }


def _writes_number(node: Node) -> bool:
    """Return whether a node writes its last input to a variable, or to some elements of a variable."""
    is_write = node.op.startswith(("Assign", "ResourceScatter", "ResourceStridedSliceAssign"))
    return is_write and len(node.inputs) > 1 and node.input_ports[-1].dtype in FLOATING


def _paths(graph: Graph, write: Node, before: set[str], consumers: Mapping[str, list[Node]]) -> list[Node]:
    """Return the nodes between a variable's reads and a write of it, without those in ``before``."""
    handle, last = write.inputs[0], graph.maker.get(write.inputs[-1])
    makers = closure(
        [last] if last else [],
        lambda node: (one for one in _made_by(graph, node) if one.name not in before),
    )
    readers = {node for node in makers if handle in node.inputs and (node.op in READS or node.called)}
    path = closure(readers, lambda node: makers.intersection(consumers[node.name]))
    return [node for node in path if node.op not in READS]


def _is_average(write: Node, path: Iterable[Node]) -> bool:
    return write.op != "AssignVariableOp" or any(node.op in _FACTORS for node in path)


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
    node.device, node.attr["dtype"].type = average.definition.device, average.input_ports[-1].dtype
    return node


def _restoring(average: Node, handle: str, applied: str, users: Sequence[str]) -> list[Any]:
    """Return nodes that run after all uses of a variable and restore its old value, unless the step was applied."""
    name, device = average.name, average.definition.device
    after = _read(f"{name}/polyamp_after", handle, users, average)
    values = [applied, f"{after.name}:value:0", f"{name}/polyamp_before:value:0"]
    chosen = NodeDef(name=f"{name}/polyamp_chosen", op="SelectV2", input=values, device=device)
    restored = NodeDef(name=f"{name}/polyamp_restored", op="AssignVariableOp", device=device)
    restored.input.extend([handle, f"{chosen.name}:output:0"])
    chosen.attr["T"].type = restored.attr["dtype"].type = average.input_ports[-1].dtype
    return [after, chosen, restored]


def _all_of(values: Sequence[str]) -> list[Any]:
    """Return nodes, the last of which computes whether all scalars are true; none for a single scalar."""
    nodes: list[Any] = []
    for value in values[1:]:
        first = f"{nodes[-1].name}:z:0" if nodes else values[0]
        nodes.append(NodeDef(name=f"polyamp_all_applied_{len(nodes)}", op="LogicalAnd", input=[first, value]))
    return nodes
