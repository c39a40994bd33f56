"""Decide a whole program: a traced function or a ``GraphDef``, with all functions that it calls.

Each function is decided for the arguments of a call, so that 16-bit values pass into it and out of it without casts.
For example, a function that is called once with a low value and once with a float32 value is decided twice. The pass
over a program is repeated until the contents of its lists are known; see `values`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.devices import device_of, lowerable
from polyamp.backends.tensorflow.graphs.capture import POLICY_ATTRIBUTE, check_graph, rewritten_before
from polyamp.backends.tensorflow.graphs.decisions import Inside, Pass, Program, TypedNode
from polyamp.backends.tensorflow.graphs.graph import FLOAT32, Graph, Node, Places
from polyamp.backends.tensorflow.graphs.values import (
    CREATING,
    VARIANT,
    Known,
    Lists,
    capture,
    is_item,
    is_list,
    value_of_type,
)
from polyamp.backends.tensorflow.operations import OPERATIONS
from polyamp.backends.tensorflow.unstable import FunctionLibrary, graph_of
from polyamp.flow import CARRIED, TABLE, Decision, Value
from polyamp.formats import format_of
from polyamp.plan import Decider
from polyamp.policies import Policy

REWRITTEN = "rewritten already"
"""The reason for a call of a function that was rewritten under the same policy."""


class Functions(Program):
    """A program whose functions are each decided once for equal arguments."""

    def settled(self, graph: Graph, arguments: Sequence[Known] = ()) -> Pass:
        """Return a graph's decisions, made again and again until the contents of its lists are known."""
        decisions = Pass(graph, self, arguments, traced=self.traced)
        for _ in range(_PASSES - 1):
            self.lists.keep(decisions.known[value].held for value in decisions.graph.returns)
            if not self.lists.settle():
                break
            self.bodies = {}
            decisions = Pass(graph, self, arguments, traced=self.traced)
        return decisions

    def decide_special(self, decisions: Pass, node: Node) -> TypedNode | None:
        """Decide a node that calls functions or has a list; None for any other node."""
        if is_list(node):
            return _list(decisions, node)
        if not node.called:
            return None
        if reason := self.why_kept(node.called):
            return _kept(decisions, node, reason)
        return _HANDLERS.get(node.op, _not_entered)(self, decisions, node)

    def body(self, name: str, arguments: Sequence[Known], path: str) -> Pass:
        """Return the decisions for a function's body with these arguments."""
        key = (name, tuple(arguments), path if self.policy.rules else "")
        if key not in self.bodies:
            graph = Graph.of_function(self.library[name], self.library)
            traced = graph_of(name, self.traced)
            self.bodies[key] = Pass(graph, self, arguments, path, traced, name)
        return self.bodies[key]

    def why_kept(self, names: Sequence[str]) -> str:
        """Return the reason why a call of these functions must stay unchanged; empty if it can change."""
        definitions = [self.library.get(name) for name in names]
        if None in definitions:
            return "an unknown function"
        return REWRITTEN if any(map(self._is_rewritten, definitions)) else ""

    def _is_rewritten(self, definition: Any) -> bool:
        marked = next((node for node in definition.node_def if POLICY_ATTRIBUTE in node.attr), None)
        if marked is None:
            return False
        policy = marked.attr[POLICY_ATTRIBUTE].s.decode()
        if policy != str(self.policy):
            raise rewritten_before(f"function {definition.signature.name}", policy)
        return True


def _call(program: Functions, decisions: Pass, node: Node) -> TypedNode:
    arguments = decisions.inputs_of(node)
    name = node.definition.attr["f"].func.name
    caller = _forward_call(decisions, program.library[name]) or node
    body = program.body(name, arguments, decisions.scopes.scope_of(caller))
    results = _results(body)
    return _calling(
        node, arguments, results, {"Tin": arguments, "Tout": results}, [Inside(name, body, _types(results))]
    )


def _conditional(program: Functions, decisions: Pass, node: Node) -> TypedNode:
    """Decide a conditional. A result is in 16 bits if every branch returns it in 16 bits, else in float32."""
    attributes = node.definition.attr
    names = [attributes[key].func.name for key in ("then_branch", "else_branch") if key in attributes]
    names = names or [function.name for function in attributes["branches"].list.func]
    chooser, *arguments = decisions.inputs_of(node)
    bodies = [program.body(name, arguments, decisions.scopes.scope_of(node)) for name in names]
    pairs = zip(node.output_ports, zip(*map(_results, bodies), strict=True), strict=True)
    results = [_joined(program.lists, port.dtype, knowns) for port, knowns in pairs]
    insides = [Inside(name, body, _types(results)) for name, body in zip(names, bodies, strict=True)]
    return _calling(node, [chooser, *arguments], results, {"Tin": arguments, "Tout": results}, insides)


def _joined(lists: Lists, declared: int, knowns: Sequence[Known]) -> Known:
    if declared == VARIANT:
        return Known(VARIANT, held=lists.tie([known.held for known in knowns]))
    if declared != FLOAT32:
        return knowns[0]
    types = {known.dtype for known in knowns}
    states = {known.value.state: known for known in knowns}
    chosen = states.get("strong") or states.get("weak") or knowns[0]
    return chosen if len(types) == 1 else chosen._replace(dtype=FLOAT32)


def _loop(program: Functions, decisions: Pass, node: Node) -> TypedNode:
    """Decide a loop: values that can add up over iterations become float32; those it only reads stay unchanged.

    The body is first decided as if all carried values were strong float32. If the body nevertheless returns a low
    value, that value does not add up, so the loop carries it in 16 bits.
    """
    names = [node.definition.attr[key].func.name for key in ("cond", "body")]
    path = decisions.scopes.scope_of(node)
    incoming = decisions.inputs_of(node)
    unchanged = _unchanged(program.library[names[1]])
    carried = [
        known
        if position in unchanged
        else Known(port.dtype, CARRIED if port.dtype == FLOAT32 else known.value, held=known.held)
        for position, (port, known) in enumerate(zip(node.input_ports, incoming, strict=True))
    ]
    made = _results(program.body(names[1], carried, path))
    low = program.low
    carried = [
        Known(low, Value("low", result.value.maker)) if _stays_low(first, known, result) else known
        for first, known, result in zip(incoming, carried, made, strict=True)
    ]
    condition, iteration = (program.body(name, carried, path) for name in names)
    for known, result in zip(carried, _results(iteration), strict=True):
        if known.dtype == VARIANT:
            program.lists.tie([known.held, result.held])
    insides = [Inside(names[0], condition, _types(_results(condition))), Inside(names[1], iteration, _types(carried))]
    return _calling(node, carried, carried, {"T": carried}, insides)


def _stays_low(first: Known, carried: Known, result: Known) -> bool:
    """Return whether an iteration takes a value as strong float32 and returns its successor as a low value."""
    is_carried = carried.dtype == FLOAT32 and carried.value == CARRIED
    return is_carried and result.value.state == "low" and not first.value.unfit


def _unchanged(body: Any) -> set[int]:
    """Return the positions of the arguments that a loop's body returns unchanged."""
    moved = {f"{node.name}:output:0": node.input[0] for node in body.node_def if node.op == "Identity"}
    found = set()
    for position, (arg, result) in enumerate(zip(body.signature.input_arg, body.signature.output_arg, strict=True)):
        value = body.ret[result.name]
        while value in moved:
            value = moved[value]
        if value == arg.name:
            found.add(position)
    return found


def _iteration(program: Functions, decisions: Pass, node: Node) -> TypedNode:
    """Decide ``for batch in dataset``: the body keeps its types, and the values that it carries are float32."""
    # Its arguments are the carried values, then an element, then captured values.
    carried = len(node.definition.attr["Tstate"].list.type)
    insides = []
    for name in node.called:
        arguments = [
            Known(arg.type, CARRIED if place < carried and arg.type == FLOAT32 else value_of_type(arg.type))
            for place, arg in enumerate(program.library[name].signature.input_arg)
        ]
        captured = len(node.definition.attr["Targuments"].list.type)
        for place, known in enumerate(decisions.inputs_of(node)[-captured:] if captured else (), -captured):
            arguments[place] = known._replace(dtype=arguments[place].dtype)
        body = program.body(name, arguments, decisions.scopes.scope_of(node))
        insides.append(Inside(name, body, tuple(dtype for _, dtype in body.graph.results)))
    decided = _kept(decisions, node, "calls functions")
    results = [known._replace(value=CARRIED) if known.dtype == FLOAT32 else known for known in decided.results]
    return decided._replace(results=results, inside=tuple(insides))


def _not_entered(program: Functions, decisions: Pass, node: Node) -> TypedNode:
    """Leave any other node's functions as written; record that they were not entered, if they have products."""
    if program.has_products(node.called):
        line = Places(decisions.traced).line(node.name)
        program.not_entered.setdefault(node.op, line or decisions.scopes.path_of(node))
    return _kept(decisions, node, "the functions of this operation run as written")


def _kept(decisions: Pass, node: Node, reason: str) -> TypedNode:
    """Leave a node that calls functions as it is; the tensor lists that it gets keep their types too."""
    decisions.program.lists.keep(known.held for known in decisions.inputs_of(node))
    return decisions.as_written(node, reason)


def _calling(
    node: Node,
    arguments: Sequence[Known],
    results: Sequence[Known],
    lists: Mapping[str, Sequence[Known]],
    insides: Sequence[Inside],
) -> TypedNode:
    changes = {
        name: tf.compat.v1.AttrValue(list=tf.compat.v1.AttrValue.ListValue(type=_types(knowns)))
        for name, knowns in lists.items()
    }
    decision = Decision(OPERATIONS[node.op], "keep", "calls functions")
    return TypedNode(node, decision, list(_types(arguments)), list(results), changes, tuple(insides))


def _results(body: Pass) -> list[Known]:
    return [body.known[value] for value in body.graph.returns]


def _types(knowns: Sequence[Known]) -> tuple[int, ...]:
    return tuple(known.dtype for known in knowns)


def _forward_call(decisions: Pass, function: Any) -> Node | None:
    """Return the forward call of a derivative function, or None. Only that call has the scopes that rules name."""
    forward = function.attr["forward_function_name"].s.decode() if "forward_function_name" in function.attr else ""
    calls = (node for node in decisions.graph.nodes if forward and "f" in node.definition.attr)
    return next((node for node in calls if node.definition.attr["f"].func.name == forward), None)


def _list(decisions: Pass, node: Node) -> TypedNode:
    """Decide a node that makes, fills, reads or moves a list: items have the type of the values put into the list."""
    name = _list_of(decisions, node)
    lists, low = decisions.program.lists, decisions.program.low
    value, attributes = lists.value_of(name), node.definition.attr
    is_low = lists.is_low(name) and "element_dtype" in attributes and attributes["element_dtype"].type == FLOAT32
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
    decision = decided.decision._replace(format=decisions.program.compute)
    return decided._replace(decision=decision, changes={"element_dtype": tf.compat.v1.AttrValue(type=low)})


def _list_of(decisions: Pass, node: Node) -> str:
    """Return the name of a node's list, and record what the node does to it."""
    lists = decisions.program.lists
    pairs = list(zip(node.input_ports, decisions.inputs_of(node), strict=True))
    names = [known.held for port, known in pairs if port.dtype == VARIANT]
    name = f"{decisions.name}/{node.name}" if node.op in CREATING else lists.tie(names)
    items = [known for port, known in pairs if is_item(node, port)]
    for known in items:
        lists.put(name, known.value)
    moves_items = bool(items) or any(is_item(node, port) for port in node.output_ports)
    has_kernel = not moves_items or lowerable(node, decisions.program.low)
    is_ruled = decisions.class_of(node, "tensor_list").reason != TABLE
    if is_ruled or not has_kernel or _adds_to_one_item(decisions, node):
        lists.keep([name])
    if node.op == "AddN":
        lists.take(name, is_low=False)  # as long as the items are float32, the sum takes float32
    return name


def _adds_to_one_item(decisions: Pass, node: Node) -> bool:
    """Return whether a node adds lists of which one is zero except for an item, the same in every iteration."""
    makers = [decisions.graph.maker.get(value) for value in node.inputs] if node.op == "AddN" else []
    sets = (maker for maker in makers if maker is not None and maker.op == "TensorListSetItem")
    return any(decisions.known[maker.inputs[1]].is_constant for maker in sets)


_HANDLERS: dict[str, Callable[[Functions, Pass, Node], TypedNode]] = {
    "PartitionedCall": _call,
    "StatefulPartitionedCall": _call,
    "If": _conditional,
    "StatelessIf": _conditional,
    "Case": _conditional,
    "StatelessCase": _conditional,
    "ReduceDataset": _iteration,
    "ScanDataset": _iteration,
    "While": _loop,
    "StatelessWhile": _loop,
}


_PASSES = 5  # more than one, because a list may hold values from another list


def decided_for(concrete: Any, policy: Policy, *, fuses: bool = True) -> Pass:
    """Return the decisions for a ``ConcreteFunction`` under a policy."""
    program = Functions(policy, FunctionLibrary(), concrete.graph, fuses=fuses)
    graph = Graph.of_function(concrete.function_def, program.library)
    return program.settled(graph, _arguments(graph, concrete, program))


def decided_graph(graph_def: Any, policy: Policy) -> Pass:
    """Return the decisions for a ``GraphDef`` under a policy."""
    check_graph(graph_def)
    program = Functions(policy, {function.signature.name: function for function in graph_def.library.function})
    return program.settled(Graph(graph_def.node, program.library))


def lowered_in(decisions: Pass) -> set[tuple[str, str]]:
    """Return the operations of class ``lower`` that run in the compute format, each with its type of device."""
    compute = decisions.program.compute
    return {
        (decided.operation, device_of(decided.node))
        for decided in decisions.everything()
        if format_of(compute).is_low and decided.decision.op_class == "lower" and decided.decision.format == compute
    }


def lowers(decisions: Pass) -> bool:
    """Return whether any operation runs in the compute format, or was rewritten to it before."""
    found = (decided.decision for decided in decisions.everything())
    return any(one.format == decisions.program.compute or one.reason == REWRITTEN for one in found)


def _arguments(graph: Graph, concrete: Any, decider: Decider) -> list[Known]:
    """Return the facts about a program's arguments; the last of them are captured values."""
    types, captures = [dtype for _, dtype in graph.arguments], concrete.captured_inputs
    variables = {id(variable.handle): variable for variable in concrete.variables}
    own = len(types) - len(captures)
    known = [Known(dtype, value_of_type(dtype)) for dtype in types[:own]]
    pairs = zip(types[own:], captures, strict=True)
    return [*known, *(capture(dtype, one, variables.get(id(one)), decider) for dtype, one in pairs)]
