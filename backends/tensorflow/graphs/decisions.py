"""One forward pass over a graph: the flow rule decides every node, and this carries the states from node to node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from polyamp.backends.tensorflow.graphs.fusing import fused
from polyamp.backends.tensorflow.graphs.graph import FLOAT32, FLOATING, Graph, Node, closes_loop
from polyamp.backends.tensorflow.graphs.kernels import device_of, lowerable
from polyamp.backends.tensorflow.graphs.lists import CREATING, HANDLED, VARIANT, Lists, holds_float32, is_item
from polyamp.backends.tensorflow.graphs.operands import (
    Operands,
    given,
    integers,
    is_constant,
    is_number,
    of_integers,
    reads_data,
)
from polyamp.backends.tensorflow.graphs.places import Places
from polyamp.backends.tensorflow.graphs.update import forward_of, is_gradient, regions
from polyamp.backends.tensorflow.operations import OPERATIONS
from polyamp.backends.tensorflow.unstable import as_asked
from polyamp.deciding import Decider
from polyamp.flow import AS_WRITTEN, CARRIED, INPUT, NO_FLOATS, WEAK, Flow, Value, specific
from polyamp.formats import format_of
from polyamp.operations import OPERATIONS as CLASSES
from polyamp.policy import Policy
from polyamp.rules import TABLE, Decision, is_wide
from polyamp.values import magnitude

_OPERATORS = {"RealDiv": "truediv", "FloorDiv": "floordiv", "FloorMod": "mod"}  # where it is not the canonical name
_DEFAULTS = {*OPERATIONS, "add", "sub", "mul", "neg", "pow", "matmul", "truediv", "while", "cond"}


class Known(NamedTuple):
    """What is known of one value of the rewritten graph.

    Attributes:
        dtype: the type it has there. A value that is low may still be held in float32.
        value: what the flow rule knows of it.
        is_constant: whether it is the same in every call.
        held: of a list of tensors: its name in `Lists`.
    """

    dtype: int
    value: Value = WEAK
    is_constant: bool = False
    held: str = ""


class Decided(NamedTuple):
    """One node, decided.

    Attributes:
        node: as it was written.
        operation: its canonical name, or TensorFlow's where there is none.
        decision: its class, and who gave it.
        outcome: the format it runs in, and why.
        takes: the type in which each input is wanted.
        gives: what is known of each output.
        changes: attributes of the node that become others.
        inside: the bodies of the functions that it calls, decided for this call.
        anew: roles of low values that are computed again in float32 for it, and not cast.
    """

    node: Node
    operation: str
    decision: Decision
    outcome: Flow
    takes: list[int]
    gives: list[Known]
    changes: Mapping[str, Any]
    inside: tuple[Any, ...] = ()
    anew: tuple[str, ...] = ()


class Rules:
    """A policy with what was found out under it; shared by all functions of one program.

    Attributes:
        fuses: whether kernels are put in the place of norms that a graph writes out.
        low: the number of TensorFlow's ``DataType`` for the compute format.
        decider: decides by the policy, and records what there is to report.
        not_entered: types of operations whose functions have products and run as written, with a place of each.
        lists: what is known of the lists of tensors.
    """

    def __init__(self, policy: Policy, *, fuses: bool = True) -> None:
        self.policy, self.decider = policy, Decider(policy)
        self.fuses = fuses and format_of(policy.compute).is_low
        self.compute = policy.compute
        self.low: int = tf.as_dtype(policy.compute).as_datatype_enum
        self.not_entered: dict[str, str] = {}
        self.lists = Lists()


class Pass:
    """The decisions for one graph, or one function's body for what it is called with.

    Attributes:
        graph: what was decided.
        rules: the policy.
        path: the scope that the graph stands in.
        traced: the ``tf.Graph`` that it was traced into, where that is known.
        regions: the nodes that keep state.
        nodes: a `Decided` for each node, in order.
        known: what is known of each value, by its name.
    """

    def __init__(
        self,
        graph: Graph,
        rules: Rules,
        functions: Any,
        arguments: Sequence[Known] = (),
        path: str = "",
        traced: Any = None,
        name: str = "",
    ) -> None:
        self.rules, self.functions, self.path, self.traced = rules, functions, path, traced
        self._name = name
        places = Places(traced)
        self.graph = graph = fused(graph, places, functions.library) if rules.fuses else graph
        names = (name for name, _ in graph.arguments)
        self.known: dict[str, Known] = dict(zip(names, arguments, strict=True))
        self._named = {node.name: node for node in graph.nodes}
        self.regions = regions(graph, functions.library)
        self._operands = Operands(graph, lambda value: places.shape(graph, value))
        self._unrounded: set[str] = set()  # what some node takes computed anew
        self.nodes: list[Decided] = []
        for node in graph.nodes:
            decided = self._node(node)
            self.nodes.append(decided)
            self._know(node, decided)
        self._take_items()

    def _take_items(self) -> None:
        """Note in what type items of lists are taken."""
        taken = [pair for decided in self.nodes for pair in zip(decided.node.inputs, decided.takes, strict=True)]
        for value, dtype in (*taken, *((value, FLOAT32) for value in self.graph.returns)):
            maker = self.graph.maker.get(value)
            if maker is not None and maker.op in HANDLED and maker.gives[maker.outputs.index(value)].dtype == FLOAT32:
                handles = zip(maker.takes, maker.inputs, strict=True)
                name = next((self.known[one].held for port, one in handles if port.dtype == VARIANT), "")
                self.rules.lists.take(name, is_low=dtype == self.rules.low)

    def _note_unrounded(self, value: str, roles: Sequence[str]) -> None:
        maker = self.computed_anew(value, roles)
        if maker is not None and value not in self._unrounded:
            self._unrounded.add(value)
            for one in maker.inputs:
                self._note_unrounded(one, roles)

    def _know(self, node: Node, decided: Decided) -> None:
        constants = {value: self.known[value].is_constant for value in node.inputs if value in self.known}
        if is_constant(node, constants):
            decided = decided._replace(gives=[known._replace(is_constant=True) for known in decided.gives])
        self.known.update(zip(node.outputs, decided.gives, strict=True))
        if decided.anew:
            for value, dtype in zip(node.inputs, decided.takes, strict=True):
                if dtype == FLOAT32 and value in self.known:
                    self._note_unrounded(value, decided.anew)

    def values_of(self, node: Node) -> list[Known]:
        """What is known of a node's inputs; of the edge that closes a loop, that it is float32 by need."""
        return [self.known.get(value, _CARRIED) for value in node.inputs]

    def computed_anew(self, value: str, roles: Sequence[str]) -> Node | None:
        """Return the node to compute again in float32, for a use that does not take values of these roles rounded."""
        known, maker = self.known[value], self.graph.maker.get(value)
        if known.dtype != self.rules.low or known.value.role not in roles or maker is None:
            return None
        if maker.op == "IdentityN":
            return self.computed_anew(maker.inputs[maker.outputs.index(value)], roles)
        return maker if len(maker.outputs) == 1 and not self.functions.calls(maker) else None

    def path_of(self, node: Node) -> str:
        """The scopes that a node stands in, and its name, as the code asked for them."""
        return _within(self.path, as_asked(self.traced, node.name))

    def scope_of(self, node: Node) -> str:
        """The scopes that a node stands in, as the code asked for them; of a gradient, those of its forward operation.

        Its own name is one of them where somebody chose it, and not where it only says what the operation is.
        """
        place = {"AddN": 0, "FusedBatchNormGradV3": 3}.get(node.op)
        first = self.graph.maker.get(node.inputs[place]) if place is not None else None
        if node.op != "AddN" and first is not None and not is_gradient(node.name):
            return self.scope_of(first)  # the gradient of a norm that was put together
        if first is not None and is_gradient(first.name) and not is_gradient(node.name):
            return self.scope_of(first)  # a sum of gradients, which has no scope
        name = forward_of(node.name) if is_gradient(node.name) else node.name
        decisions, known = self._named_in(name)
        scopes, _, own = as_asked(decisions.traced, name if known is None else known.name).rpartition("/")
        is_chosen = own not in _DEFAULTS if known is None else not _says_operation(own, known.op)
        return _within(self.path, "/".join(filter(None, (scopes, own if is_chosen else ""))))

    def named(self, name: str) -> Node | None:
        """The node of this name, or else the one in whose scope that stands."""
        while name and name not in self._named:
            name = name.rpartition("/")[0]
        return self._named.get(name)

    def _named_in(self, name: str) -> tuple[Pass, Node | None]:
        """As `named`, in this graph or in the forward function that it differentiates."""
        if (node := self.named(name)) is not None:
            return self, node
        forward = next((one for one in self.functions.bodies if one.path == self.path and one.named(name)), self)
        return forward, forward.named(name)

    def as_written(self, node: Node, reason: str, value: Value = WEAK, decision: Decision | None = None) -> Decided:
        """A node that keeps the types it has."""
        operation = OPERATIONS.get(node.op, node.op)
        return self.decided(node, operation, decision or Decision("keep", reason), Flow(AS_WRITTEN, value, reason))

    def decided(
        self, node: Node, operation: str, decision: Decision, outcome: Flow, low: Sequence[str] = ()
    ) -> Decided:
        """A node of which the type attributes ``low`` become the compute format's."""
        dtype = self.rules.low
        takes = [dtype if port.attribute in low and port.dtype == FLOAT32 else port.dtype for port in node.takes]
        made = self._integers(node)
        gives = [
            Known(dtype if port.attribute in low else FLOAT32, _given(node, port, operation, outcome))
            if port.dtype == FLOAT32
            else _declared(port, made)
            for port in node.gives
        ]
        changes = {name: tf.compat.v1.AttrValue(type=dtype) for name in low}
        return Decided(node, operation, decision, outcome, takes, gives, changes, anew=outcome.anew)

    def _integers(self, node: Node) -> Value:
        if not any(is_number(port.dtype) and port.dtype not in FLOATING for port in node.gives):
            return WEAK
        return integers(node, {value: self.known[value].value for value in node.inputs if value in self.known})

    def _node(self, node: Node) -> Decided:
        handler = self.functions.handler(node)
        special = _SPECIAL.get(node.op) or handler
        if special is None and node.op in HANDLED and VARIANT in {port.dtype for port in (*node.takes, *node.gives)}:
            return self._list(node)
        if handler is None and node.op != "IdentityN":
            self.rules.lists.keep(known.held for known in self.values_of(node))
        if node.name in self.regions.update:
            return self.as_written(node, "updates variables", Value("strong", "the update"))
        if special is not None:
            return special(self, node)
        return self._operation(node)

    def _list(self, node: Node) -> Decided:
        """A node that makes, fills, reads or hands on a list: its items have the type of what was put into it."""
        lists, knowns = self.rules.lists, self.values_of(node)
        pairs = list(zip(node.takes, knowns, strict=True))
        names = [known.held for port, known in pairs if port.dtype == VARIANT]
        name = f"{self._name}/{node.name}" if node.op in CREATING else lists.tie(names)
        decision = self.rules.decider.decide("tensor_list", self._ruled_path(node) if self.rules.policy.rules else "")
        items = [known for port, known in pairs if is_item(node, port)]
        for known in items:
            lists.put(name, known.value)
        has_kernel = not (items or any(is_item(node, port) for port in node.gives)) or lowerable(node, self.rules.low)
        if decision.reason != TABLE or not has_kernel or self._adds_to_one_item(node):
            lists.keep([name])
        if node.op == "AddN":
            lists.sum(name)
        value = lists.value_of(name)
        is_low = lists.is_low(name) and holds_float32(node)
        dtype = self.rules.low if is_low else FLOAT32
        reason = (
            (f"holds what {value.maker} made" if value.maker else "its items are lowered")
            if is_low
            else "holds float32"
        )
        made = self.as_written(node, reason, value, decision)
        return made._replace(
            outcome=Flow(self.rules.compute, value, made.outcome.reason) if is_low else made.outcome,
            takes=[dtype if is_item(node, port) else port.dtype for port in node.takes],
            gives=[
                Known(VARIANT, held=name)
                if port.dtype == VARIANT
                else Known(dtype, value)
                if is_item(node, port)
                else known
                for port, known in zip(node.gives, made.gives, strict=True)
            ],
            changes={"element_dtype": tf.compat.v1.AttrValue(type=dtype)} if is_low else {},
        )

    def _adds_to_one_item(self, node: Node) -> bool:
        """Whether lists are added of which one differs from zeros in one item, the same in every turn of a loop."""
        makers = [self.graph.maker.get(value) for value in node.inputs] if node.op == "AddN" else []
        sets = (maker for maker in makers if maker is not None and maker.op == "TensorListSetItem")
        return any(self.known[maker.inputs[1]].is_constant for maker in sets)

    def _operation(self, node: Node) -> Decided:
        inputs = self._floating(node)
        operation = self._specific(node)
        decision = self.rules.decider.decide(operation, self._ruled_path(node) if self.rules.policy.rules else "")
        if node.name in self.regions.averaging and decision.op_class != "lower":  # a state may go through products
            return self.as_written(node, "updates its own variable", Value("strong", "the update"), decision)
        if operation == "tensor_list":
            return self.as_written(node, "holds float32", Value("strong", operation), decision)
        if not inputs:
            data = INPUT if reads_data(node) and node.op != "ReadVariableOp" else WEAK
            return self.as_written(node, NO_FLOATS, data, decision)
        if any(port.dtype > 100 for port in node.takes):
            return self.as_written(node, "reads a variable by reference", decision=decision)
        outcome = self._outcome(node, operation, decision, inputs)
        if outcome.format != self.rules.compute or is_wide(operation, decision):
            return self.decided(node, operation, decision, outcome)
        if low := lowerable(node, self.rules.low):
            return self.decided(node, operation, decision, outcome, low)
        return self._without_kernel(node, operation, decision, outcome)

    def _specific(self, node: Node) -> str:
        """The canonical name of what a node is, given what its operands are."""
        operation = OPERATIONS.get(node.op, node.op)
        if operation in ("mul", "div"):
            first, *others = (known.is_constant for known in self.values_of(node))
            over = (first and not any(others)) or self._operands.divides_again(node)
            return specific(operation, of_itself=self._operands.are_same(node), over=over)
        if operation in ("scatter", "scatter_add") and node.name in self.regions.backward:
            return "sum"  # of the gradients of what was gathered from one place
        is_expanded = _EXPANDED in f"{self.path}/{node.name}" and operation in CLASSES
        if is_expanded and CLASSES[operation].op_class in ("lower", "follow"):
            return "matrix_exp" if _EXPANDED in self.scope_of(node).split("/") else operation
        return operation

    def _outcome(self, node: Node, operation: str, decision: Decision, inputs: tuple[Value, ...]) -> Flow:
        is_backward = node.name in self.regions.backward
        is_product = decision.reason == TABLE and node.op in _SATURATED_GRADIENTS
        if is_product:  # ``y * (1 - y) * grad``, and the gradient is bounded by nothing
            outcome = self.rules.decider.flow("mul", Decision("follow", TABLE), inputs, gradient=True)
        else:
            outcome = self.rules.decider.flow(operation, decision, inputs, gradient=is_backward)
        if is_product and outcome.output.state == "low" and node.inputs[0] in self._unrounded:
            return Flow("float32", outcome.output, "as its forward operation", ("saturated",))
        if is_backward and outcome.format == "float32" and outcome.output.state == "strong":
            return outcome._replace(anew=(*outcome.anew, "saturated"))  # as what made the gradient took it
        return outcome

    def _without_kernel(self, node: Node, operation: str, decision: Decision, outcome: Flow) -> Decided:
        missing = f"no {self.rules.compute} kernel for {node.op} on {device_of(node)}"
        state = outcome.output if decision.op_class == "inner" else WEAK
        if decision.reason != TABLE:
            state = Value("strong", operation)
            self.rules.decider.refuse(f"there is {missing}, so it runs in float32", decision)
        return self.decided(node, operation, decision, Flow("float32", state, missing))

    def _ruled_path(self, node: Node) -> str:
        """Rules about a forward operation are about its gradients too; the scope of all gradients can be named."""
        scope = self.scope_of(node)
        return f"gradient_tape/{scope}" if is_gradient(node.name) else scope

    def _floating(self, node: Node) -> tuple[Value, ...]:
        pairs = zip(node.takes, self.values_of(node), strict=True)
        return tuple(known.value for port, known in pairs if port.dtype % 100 in FLOATING)


def _within(path: str, name: str) -> str:
    """A name in a function that is called at a path; bodies of loops and branches have names with the path in them."""
    return name if f"{name}/".startswith(f"{path}/") else "/".join(filter(None, (path, name)))


def _says_operation(name: str, op: str) -> bool:
    """Whether a name is what TensorFlow calls an operation that nobody named."""
    return name.lower() in {op.lower(), op.lower().rstrip("v234"), OPERATIONS.get(op, ""), _OPERATORS.get(op)}


def _declared(port: Any, integers: Value) -> Known:
    return Known(port.dtype, given(port.dtype) if port.dtype in FLOATING else integers)


def _given(node: Node, port: Any, operation: str, outcome: Flow) -> Value:
    """What is known of a float32 output: what a normalisation gives beside its data are statistics."""
    is_data = port.attribute == node.gives[0].attribute and (port is node.gives[0] or operation != "batch_norm")
    own = is_data or outcome.output.state != "low"
    return outcome.output if own else Value("strong", operation, role="statistic")


def _constant(decisions: Pass, node: Node) -> Decided:
    tensor = node.definition.attr["value"].tensor
    value = WEAK
    if tensor.dtype == FLOAT32:
        value = decisions.rules.decider.constant(magnitude(tf.make_ndarray(tensor)))
    return decisions.as_written(node, "table", value)


def _cast(decisions: Pass, node: Node) -> Decided:
    """What becomes float32 of integers is the user's data, as they are; of booleans it is not."""
    if node.takes[0].dtype in FLOATING or node.gives[0].dtype != FLOAT32:
        return decisions._operation(node)
    known, maker = decisions.values_of(node)[0], decisions.graph.maker.get(node.inputs[0])
    return decisions.as_written(node, "table", of_integers(node, known.value, maker, decisions.rules.compute))


def _shape(decisions: Pass, node: Node) -> Decided:
    """Sizes are read off values as they are."""
    decided = decisions._operation(node)
    types = {known.dtype for known in decisions.values_of(node)}
    if types != {decisions.rules.low} or any(port.attribute != "T" or port.dtype != FLOAT32 for port in node.takes):
        return decided
    changes = {"T": tf.compat.v1.AttrValue(type=decisions.rules.low)}
    return decided._replace(takes=[decisions.rules.low] * len(node.takes), changes=changes)


def _merge(decisions: Pass, node: Node) -> Decided:
    """The head of a loop is float32, as what it carries is added up over the turns; any other merge moves values."""
    makers = [decisions.graph.maker[value] for value in node.inputs]
    if any(map(closes_loop, makers)):
        return decisions.as_written(node, "what a loop carries", CARRIED)
    return decisions._operation(node)


def _identities(decisions: Pass, node: Node) -> Decided:
    """Each of its values is moved by itself."""
    knowns = decisions.values_of(node)
    types = [known.dtype for known in knowns]
    if types == [port.dtype for port in node.takes]:
        return decisions.as_written(node, "table")._replace(gives=knowns)
    listed = tf.compat.v1.AttrValue(list=tf.compat.v1.AttrValue.ListValue(type=types))
    decided = decisions.as_written(node, "table")
    return decided._replace(
        takes=types,
        gives=knowns,
        changes={"T": listed},
        outcome=Flow(decisions.rules.compute, WEAK, "moves values"),
    )


def _loop_edge(decisions: Pass, node: Node) -> Decided:
    """What enters a loop or goes on to its next turn has the type of the loop's head; constants of a loop do not."""
    if node.op == "Enter" and node.definition.attr["is_constant"].b:
        return decisions._operation(node)
    return decisions.as_written(node, "what a loop carries", CARRIED)


_CARRIED = Known(FLOAT32, CARRIED)
_SATURATED_GRADIENTS = ("SigmoidGrad", "TanhGrad")
_EXPANDED = "matrix_exponential"  # the scope of ``tf.linalg.expm``, whose coefficients go up to 6e16
_SPECIAL = {
    "Cast": _cast,
    "Const": _constant,
    "Enter": _loop_edge,
    "IdentityN": _identities,
    "Merge": _merge,
    "NextIteration": _loop_edge,
    **dict.fromkeys(("Rank", "Shape", "ShapeN", "Size"), _shape),
}
