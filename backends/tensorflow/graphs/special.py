"""The nodes that the flow rule alone does not decide: constants, casts, sizes, lists, and the edges of loops.

Each function here takes the pass over a graph and a node of the graph, and returns the decision for the node.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from polyamp.backends.tensorflow.graphs.decisions import Decided, Pass
from polyamp.backends.tensorflow.graphs.graph import FLOAT32, FLOATING, Node, closes_loop, lowerable
from polyamp.backends.tensorflow.graphs.values import CREATING, VARIANT, Known, holds_float32, is_item, value_of_cast
from polyamp.flow import CARRIED, TABLE, WEAK, Flow, magnitude


def _constant(decisions: Pass, node: Node) -> Decided:
    tensor = node.definition.attr["value"].tensor
    value = WEAK
    if tensor.dtype == FLOAT32:
        value = decisions.rules.decider.constant(magnitude(tf.make_ndarray(tensor)))
    return decisions.as_written(node, TABLE, value)


def _cast(decisions: Pass, node: Node) -> Decided:
    """Decide a cast. Integers that become float32 count as the user's inputs; booleans do not."""
    if node.input_ports[0].dtype in FLOATING or node.output_ports[0].dtype != FLOAT32:
        return decisions.by_flow(node)
    known, maker = decisions.inputs_of(node)[0], decisions.graph.maker.get(node.inputs[0])
    return decisions.as_written(node, TABLE, value_of_cast(node, known.value, maker, decisions.rules.decider))


def _shape(decisions: Pass, node: Node) -> Decided:
    """Decide a node that reads sizes: it takes values without casts."""
    decided = decisions.by_flow(node)
    low = decisions.rules.low
    types = {known.dtype for known in decisions.inputs_of(node)}
    if types != {low} or any(port.attribute != "T" or port.dtype != FLOAT32 for port in node.input_ports):
        return decided
    changes = {"T": tf.compat.v1.AttrValue(type=low)}
    return decided._replace(input_types=[low] * len(node.input_ports), changes=changes)


def _identities(decisions: Pass, node: Node) -> Decided:
    """Decide a node that moves several values without casts."""
    knowns = decisions.inputs_of(node)
    types = [known.dtype for known in knowns]
    decided = decisions.as_written(node, TABLE)._replace(results=knowns)
    if types == [port.dtype for port in node.input_ports]:
        return decided
    listed = tf.compat.v1.AttrValue(list=tf.compat.v1.AttrValue.ListValue(type=types))
    outcome = Flow(decisions.rules.compute, WEAK, "moves values")
    return decided._replace(input_types=types, changes={"T": listed}, outcome=outcome)


def _merge(decisions: Pass, node: Node) -> Decided:
    """Decide a merge. The head of a loop is float32, because its values may add up; other merges only move values."""
    makers = [decisions.graph.maker[value] for value in node.inputs]
    if any(map(closes_loop, makers)):
        return decisions.as_written(node, "carried by a loop", CARRIED)
    return decisions.by_flow(node)


def _loop_edge(decisions: Pass, node: Node) -> Decided:
    """Decide an edge into a loop or to its next iteration: it has the type of the loop's head, except for constants."""
    if node.op == "Enter" and node.definition.attr["is_constant"].b:
        return decisions.by_flow(node)
    return decisions.as_written(node, "carried by a loop", CARRIED)


def decide_list(decisions: Pass, node: Node) -> Decided:
    """Decide a node that makes, fills, reads or moves a list: items have the type of the values put into the list."""
    name = _list_of(decisions, node)
    lists, low = decisions.rules.lists, decisions.rules.low
    value, is_low = lists.value_of(name), lists.is_low(name) and holds_float32(node)
    dtype = low if is_low else FLOAT32
    reason = f"holds values from {value.maker}" if value.maker else "its items are lowered"
    decided = decisions.as_written(
        node, reason if is_low else "holds float32", value, decisions.class_of(node, "tensor_list")
    )
    decided = decided._replace(
        input_types=[dtype if is_item(node, port) else port.dtype for port in node.input_ports],
        results=[
            Known(VARIANT, held=name)
            if port.dtype == VARIANT
            else Known(dtype, value)
            if is_item(node, port)
            else known
            for port, known in zip(node.output_ports, decided.results, strict=True)
        ],
    )
    if not is_low:
        return decided
    outcome = decided.outcome._replace(format=decisions.rules.compute)
    return decided._replace(outcome=outcome, changes={"element_dtype": tf.compat.v1.AttrValue(type=low)})


def _list_of(decisions: Pass, node: Node) -> str:
    """Return the name of a node's list, and record what the node does to it."""
    lists = decisions.rules.lists
    pairs = list(zip(node.input_ports, decisions.inputs_of(node), strict=True))
    names = [known.held for port, known in pairs if port.dtype == VARIANT]
    name = f"{decisions.name}/{node.name}" if node.op in CREATING else lists.tie(names)
    items = [known for port, known in pairs if is_item(node, port)]
    for known in items:
        lists.put(name, known.value)
    moves_items = bool(items) or any(is_item(node, port) for port in node.output_ports)
    has_kernel = not moves_items or lowerable(node, decisions.rules.low)
    is_ruled = decisions.class_of(node, "tensor_list").reason != TABLE
    if is_ruled or not has_kernel or _adds_to_one_item(decisions, node):
        lists.keep([name])
    if node.op == "AddN":
        lists.sum(name)
    return name


def _adds_to_one_item(decisions: Pass, node: Node) -> bool:
    """Return whether a node adds lists, and one of them is zero except for one item, the same in every iteration."""
    makers = [decisions.graph.maker.get(value) for value in node.inputs] if node.op == "AddN" else []
    sets = (maker for maker in makers if maker is not None and maker.op == "TensorListSetItem")
    return any(decisions.known[maker.inputs[1]].is_constant for maker in sets)


SPECIAL: dict[str, Callable[[Pass, Node], Decided]] = {
    "Cast": _cast,
    "Const": _constant,
    "Enter": _loop_edge,
    "IdentityN": _identities,
    "Merge": _merge,
    "NextIteration": _loop_edge,
    **dict.fromkeys(("Rank", "Shape", "ShapeN", "Size"), _shape),
}
