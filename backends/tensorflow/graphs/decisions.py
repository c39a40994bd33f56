"""The pass over a graph that decides the format of every node by the flow rule, from inputs to outputs.

For example, in ``loss = tf.exp(x @ w)`` the node of ``x @ w`` is decided first: its class is ``lower``, so it takes its
inputs in 16 bits and its output is low. Then `tf.exp`, whose class is ``full``, takes this output in float32.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from polyamp.backends.tensorflow.devices import device_of, lowerable
from polyamp.backends.tensorflow.graphs.graph import (
    FLOAT32,
    FLOATING,
    READS,
    Graph,
    Node,
    Places,
    Port,
    Scopes,
    called_functions,
    closes_loop,
    closure,
    is_gradient,
    terms_of,
)
from polyamp.backends.tensorflow.graphs.norms import fused
from polyamp.backends.tensorflow.graphs.parts import parts_of
from polyamp.backends.tensorflow.graphs.values import (
    HANDLED,
    KNOWN_CARRIED,
    VARIANT,
    Integers,
    Known,
    Lists,
    is_list,
    is_number,
    numbered,
    numbers_in,
    reads_data,
    value_of_cast,
    value_of_integers,
    value_of_type,
)
from polyamp.backends.tensorflow.operations import OPERATIONS
from polyamp.flow import CARRIED, INPUT, NO_FLOATS, TABLE, WEAK, Decision, Value
from polyamp.formats import format_of
from polyamp.operations import OPERATIONS as CLASSES
from polyamp.plan import Decider
from polyamp.policies import Policy
from polyamp.readers import DIVIDES, Read, factor, look

_UPDATE = Value("strong", "the update")
_SATURATED_GRADIENTS = ("SigmoidGrad", "TanhGrad")
_PRODUCTS = ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum")
_LOW_VALUE = "the value whose gradient it is"
_MOVING = ("reshape", "transpose", "identity", "slice", "split", "where")
_EXPANDED = "matrix_exponential"  # the scope of ``tf.linalg.expm``, whose coefficients go up to 6e16


class Inside(NamedTuple):
    """The decided body of a function that a node calls."""

    name: str  # the function's name
    decisions: Pass  # the decisions for its body
    results: tuple[int, ...]  # the type that each result must have


class TypedNode(NamedTuple):
    """One node with its decision, and the types that follow from it."""

    node: Node  # the node as it was written
    decision: Decision  # its operation has TensorFlow's name if it has no canonical one
    input_types: list[int]  # the type that each input must have
    results: list[Known]  # the facts about each output
    changes: Mapping[str, Any]  # attributes of the node that get another value
    inside: tuple[Inside, ...] = ()  # the bodies of the functions that it calls, decided for this call

    @property
    def operation(self) -> str:
        """The canonical name of the node's operation."""
        return self.decision.operation


class Program(Decider):
    """What the passes over the functions of one program share."""

    def __init__(self, policy: Policy, library: Mapping[str, Any], traced: Any = None, *, fuses: bool = True) -> None:
        super().__init__(policy)
        self.library, self.traced = library, traced
        self.fuses = fuses and format_of(policy.compute).is_low
        self.low: int = tf.as_dtype(policy.compute).as_datatype_enum
        self.not_entered: dict[str, str] = {}
        self.lists = Lists()
        self.bodies: dict[Any, Pass] = {}  # that have been decided so far

    @abstractmethod
    def decide_special(self, decisions: Pass, node: Node) -> TypedNode | None:
        """Decide a node that calls functions or has a list; None for any other node."""

    def has_products(self, names: Sequence[str]) -> bool:
        """Return whether functions, or functions that they call, have float32 products that a policy would lower."""

        def nodes(name: str) -> Sequence[Any]:
            return self.library[name].node_def if name in self.library else ()

        entered = closure(names, lambda name: (one for node in nodes(name) for one in called_functions(node)))
        return any(_is_full_product(node) for name in entered for node in nodes(name))


def _is_full_product(definition: Any) -> bool:
    operation = OPERATIONS.get(definition.op)
    if operation is None or CLASSES[operation].op_class != "lower":
        return False
    return any(definition.attr[key].type == FLOAT32 for key in ("T", "dtype") if key in definition.attr)


class Pass:
    """The decisions for one graph, or for a function's body with the arguments of one call."""

    def __init__(
        self,
        graph: Graph,
        program: Program,
        arguments: Sequence[Known] = (),
        path: str = "",
        traced: Any = None,
        name: str = "",
    ) -> None:
        self.program, self.traced, self.name = program, traced, name
        places = Places(traced)
        self.graph = graph = fused(graph, places, program.library) if program.fuses else graph
        names = (name for name, _ in graph.arguments)
        self.known: dict[str, Known] = dict(zip(names, arguments, strict=True))
        self.integers = Integers(graph, self.known)
        self.scopes = Scopes(graph, path, traced, lambda: (body.scopes for body in program.bodies.values()))
        self.parts, self._places = parts_of(graph, program.library), places
        self._numbering, self._numbers = numbered(graph, self.known, lambda value: places.shape(graph, value))
        # the first value with a number and a type
        self._equal = {(self._numbers[name], known.dtype): name for name, known in self.known.items()}
        constants = {value for value, number in self._numbers.items() if self._numbering.is_constant(number)}
        self._looked = look(
            [*self._reads()], results=graph.returns, constants=constants, written={}, number=self._numbers.__getitem__
        )
        for name, known in self.known.items():
            if self.is_divisor(name) and known.as_divisor is not None:
                self.known[name] = known._replace(value=known.as_divisor)
        self._held: dict[str, str] = {}  # the products so far that are in float32, and why
        self._unrounded: set[str] = set()  # the values that some node takes computed anew
        self._takers = defaultdict[str, list[Node]](list)
        for node in graph.nodes if self.parts.backward else ():
            for value in node.inputs:
                self._takers[value].append(node)
        self.nodes: list[TypedNode] = []
        for node in graph.nodes:
            decided = self._decide(node)
            self.nodes.append(decided)
            self._remember(node, decided)
        self._note_items()

    def everything(self) -> Iterator[TypedNode]:
        """Yield all nodes, those of a called function before the call."""
        for decided in self.nodes:
            for inside in decided.inside:
                yield from inside.decisions.everything()
            yield decided

    def is_divisor(self, value: str) -> bool:
        """Return whether a value is a constant that something is divided by."""
        return self._looked.get(value) == DIVIDES

    def elements(self, value: str) -> int:
        """Return the number of elements of a value; 0 if it is not known."""
        return self._places.elements(self.graph, value)

    def inputs_of(self, node: Node) -> list[Known]:
        """Return the facts about a node's inputs; a value that a later node hands back to a loop counts as strong."""
        return [self.known.get(value, KNOWN_CARRIED) for value in node.inputs]

    def equal(self, value: str) -> str:
        """Return the first value of the graph that equals this one and has the same type."""
        return self._equal[self._numbers[value], self.known[value].dtype]

    def computed_anew(self, value: str, roles: Sequence[str]) -> Node | None:
        """Return the node to compute again in float32, for a use that must not take rounded values of these roles."""
        known, maker = self.known[value], self.graph.maker.get(value)
        if known.dtype != self.program.low or known.value.role not in roles or maker is None:
            return None
        if maker.op == "IdentityN":
            return self.computed_anew(maker.inputs[maker.outputs.index(value)], roles)
        return maker if len(maker.outputs) == 1 and not maker.called else None

    def class_of(self, node: Node, operation: str) -> Decision:
        """Return the decision about the class of an operation, by the path of its node."""
        return self.program.decide(operation, self.scopes.ruled_path(node) if self.program.policy.rules else "")

    def as_written(self, node: Node, reason: str, value: Value = WEAK, decision: Decision | None = None) -> TypedNode:
        """Return a node that keeps its types, with the reason and the state of its results."""
        operation = OPERATIONS.get(node.op, node.op)
        op_class = decision.op_class if decision else "keep"
        return self.typed(node, Decision(operation, op_class, reason, output=value))

    def typed(self, node: Node, decision: Decision, low: Sequence[str] = ()) -> TypedNode:
        """Return a node with the types that a decision gives it; the attributes ``low`` get the compute format."""
        dtype = self.program.low
        types = [dtype if port.attribute in low and port.dtype == FLOAT32 else port.dtype for port in node.input_ports]
        of_integers = self._value_of_integers(node)
        results = [
            Known(dtype if port.attribute in low else FLOAT32, _value_of_output(node, port, decision))
            if port.dtype == FLOAT32
            else Known(port.dtype, value_of_type(port.dtype) if port.dtype in FLOATING else of_integers)
            for port in node.output_ports
        ]
        changes = {name: tf.compat.v1.AttrValue(type=dtype) for name in low}
        return TypedNode(node, decision, types, results, changes)

    def by_flow(self, node: Node) -> TypedNode:
        """Decide a node by the flow rule."""
        pairs = zip(node.input_ports, self.inputs_of(node), strict=True)
        inputs = tuple(known.value for port, known in pairs if port.dtype % 100 in FLOATING)
        operation = self._specific(node)
        ruled = "square" if operation == "mul" and self._doubles(node) else operation
        decision = self.class_of(node, ruled)
        if node.name in self.parts.averaging and decision.op_class != "lower":  # a state may go through products
            return self.as_written(node, "updates its own variable", _UPDATE, decision)
        if operation == "tensor_list":
            return self.as_written(node, "holds float32", Value("strong", operation), decision)
        if not inputs:
            data = INPUT if reads_data(node) else WEAK
            if node.op in READS:
                data = self.inputs_of(node)[0].value  # what is known of the variable
            return self.as_written(node, NO_FLOATS, data, decision)
        if any(port.dtype > 100 for port in node.input_ports):
            return self.as_written(node, "reads a variable by reference", decision=decision)
        decision = self._with_format(node, decision, inputs)
        is_full = decision.format != self.program.compute or decision.is_wide
        decision = decision._replace(operation=operation)
        if is_full:
            return self.typed(node, decision)
        if low := lowerable(node, self.program.low):
            return self.typed(node, decision, low)
        return self._without_kernel(node, decision)

    def _reads(self) -> Iterator[Read]:
        """Yield the operations of the forward pass that read floating values."""
        for node in self.graph.nodes:
            inputs = [value for value, dtype in node.typed_inputs if dtype % 100 in FLOATING]
            if not inputs or node.name in self.parts.update or node.name in self.parts.backward:
                continue
            operation = self._specific(node)
            op_class = self.class_of(node, operation).op_class
            if operation in ("tensor_list", "loop_edge"):
                op_class = "keep"  # what becomes of the values is not known here
            made = zip(node.outputs, node.output_ports, strict=True)
            outputs = [value for value, port in made if port.dtype in FLOATING]
            if operation != "shape":
                yield Read(operation, op_class, inputs, outputs, factor(operation, numbers_in(self.graph, node)))

    def _decide(self, node: Node) -> TypedNode:
        if not (is_list(node) or node.op == "IdentityN" or node.called):
            self.program.lists.keep(known.held for known in self.inputs_of(node))
        if node.name in self.parts.update and not is_list(node):
            return self.as_written(node, "updates variables", _UPDATE)
        is_averaging = node.name in self.parts.averaging and node.called
        if is_averaging and not self.program.has_products(node.called):
            return self.as_written(node, "updates its own variable", _UPDATE)
        if node.op in _SPECIAL:
            return _SPECIAL[node.op](self, node)
        return self.program.decide_special(self, node) or self.by_flow(node)

    def _remember(self, node: Node, decided: TypedNode) -> None:
        if decided.decision.op_class == "lower" and decided.decision.output.state == "strong":
            self._held[node.name] = decided.decision.reason
        for value, known in zip(node.outputs, decided.results, strict=True):
            number = self._numbers[value]
            is_constant = self._numbering.is_constant(number)
            is_backward = node.name in self.parts.backward
            if is_constant and known.dtype == FLOAT32 and not known.value.unfit and not is_backward:
                known = known._replace(value=self._value_of_constant(decided, known.value))
            self.known[value] = known._replace(is_constant=is_constant)
            self._equal.setdefault((number, known.dtype), value)
        if decided.decision.anew:
            for value, dtype in zip(node.inputs, decided.input_types, strict=True):
                if dtype == FLOAT32 and value in self.known:
                    self._note_unrounded(value, decided.decision.anew)

    def _value_of_constant(self, decided: TypedNode, value: Value) -> Value:
        """Return the facts about a constant: role ``weights`` if computed, so that the numbers are unknown."""
        if decided.decision.op_class == "keep" or decided.node.op in ("Const", "IdentityN"):
            return value
        if decided.decision.op_class == "neutral" and decided.operation != "fill":
            return self.inputs_of(decided.node)[0].value
        return value._replace(role="weights")

    def _note_unrounded(self, value: str, roles: Sequence[str]) -> None:
        maker = self.computed_anew(value, roles)
        if maker is not None and value not in self._unrounded:
            self._unrounded.add(value)
            for one in maker.inputs:
                self._note_unrounded(one, roles)

    def _note_items(self) -> None:
        """Record, for each item of a list, the types in which the graph's nodes take the item."""
        taken = [pair for decided in self.nodes for pair in zip(decided.node.inputs, decided.input_types, strict=True)]
        for value, dtype in (*taken, *((value, FLOAT32) for value in self.graph.returns)):
            maker = self.graph.maker.get(value)
            if maker is None or maker.op not in HANDLED:
                continue
            if maker.output_ports[maker.outputs.index(value)].dtype == FLOAT32:
                handles = zip(maker.input_ports, maker.inputs, strict=True)
                name = next((self.known[one].held for port, one in handles if port.dtype == VARIANT), "")
                self.program.lists.take(name, is_low=dtype == self.program.low)

    def _value_of_integers(self, node: Node) -> Value:
        if not any(is_number(port.dtype) and port.dtype not in FLOATING for port in node.output_ports):
            return WEAK
        return value_of_integers(node, {one: self.known[one].value for one in node.inputs if one in self.known})

    def _specific(self, node: Node) -> str:
        """Return the canonical name of a node's operation, which can depend on the operands."""
        operation = OPERATIONS.get(node.op, node.op)
        if operation == "matmul":
            return self._product(node)
        if operation in ("mul", "div"):
            if self._divides_again(node):
                return "reciprocal"
            first, second = (self._numbers.get(value, -1) for value in node.inputs)
            return self._numbering.specific(operation, first, second)
        if operation in ("scatter", "scatter_add") and node.name in self.parts.backward:
            return "sum"  # it adds the gradients of everything that was gathered from one place
        is_expanded = _EXPANDED in f"{self.scopes.path}/{node.name}" and operation in CLASSES
        if is_expanded and CLASSES[operation].op_class in ("lower", "follow"):
            return "matrix_exp" if _EXPANDED in self.scopes.scope_of(node).split("/") else operation
        return operation

    def _product(self, node: Node) -> str:
        """Return the canonical name of a product; in the backward pass, that of the product that it differentiates."""
        if node.name in self.parts.backward:
            forward = self._product_before(node)
            return "matmul" if forward is None else self._specific(forward)
        if node.op not in _PRODUCTS:
            return "matmul"
        lengths = [self._places.lengths(self.graph, value) for value in node.inputs]
        terms = terms_of(node, lengths)
        if len(lengths) == 1:
            return "transpose" if terms == 1 else "sum"
        sizes = {math.prod(one) for one in lengths}
        result = self._places.lengths(self.graph, node.outputs[0])
        is_aligned = 0 not in (*lengths[0], *lengths[1], *result) and sizes == {math.prod(result) * terms}
        numbers = [self._numbers.get(value, -1) for value in node.inputs]
        return self._numbering.product(numbers, terms, is_aligned=is_aligned)

    def _product_before(self, node: Node) -> Node | None:
        """Return the product of the forward pass that a node differentiates, if it is in this graph."""
        forward = self.scopes.forward_node(node) if node.name in self.parts.backward else None
        is_product = forward is not None and forward.op in _PRODUCTS and forward.name not in self.parts.backward
        return forward if is_product else None

    def _divides_again(self, node: Node) -> bool:
        """Return whether a node divides a quotient by its denominator again, like the derivative ``-x / y / y``."""
        # Such a value is as large as a reciprocal of ``y``. It is not a gradient, so no loss scale brings it into
        # range.
        before = self.graph.maker.get(node.inputs[0])
        if before is None or {node.op, before.op} != {"RealDiv"}:
            return False
        return self._numbers[before.inputs[1]] == self._numbers[node.inputs[1]]

    def _doubles(self, node: Node) -> bool:
        """Return whether a product is ``2 * x`` in a square's derivative, which is decided as the square is."""
        if node.name not in self.parts.backward:
            return False
        first, second = (self._numbering.is_constant(self._numbers.get(value, -1)) for value in node.inputs)
        maker = self.graph.maker.get(node.inputs[0])
        return second and not first and (maker is None or maker.name not in self.parts.backward)

    def _with_format(self, node: Node, decision: Decision, inputs: tuple[Value, ...]) -> Decision:
        """Return a decision with the format, and with the state of the output, by the flow rule."""
        is_backward = node.name in self.parts.backward
        is_product = decision.reason == TABLE and node.op in _SATURATED_GRADIENTS
        if is_product:  # ``y * (1 - y) * grad``, and nothing bounds the gradient
            as_product = self.program.flow(Decision("mul", "follow", TABLE), inputs, gradient=True)
            decision = as_product._replace(operation=decision.operation, op_class=decision.op_class)
        else:
            forward = self._product_before(node) if decision.op_class == "lower" else None
            found = next((self._looked[one] for one in node.outputs if one in self._looked), "")
            asked = found if forward is None else self._held.get(forward.name, "")
            is_low = is_backward and decision.reason == TABLE and self._is_gradient_of_low(node)
            if is_low and sorted(value.state for value in inputs) == ["low", "strong"]:  # one is rounded already
                inputs = (Value("low", _LOW_VALUE),)
            decision = self.program.flow(decision, inputs, gradient=is_backward, asked=asked)
            if is_low and decision.output.state == "strong":  # more parts may cancel, so only their sum is rounded
                return decision._replace(output=Value("low", _LOW_VALUE))
        compares = decision.operation == "compare" and is_gradient(node.name)  # as the derivative of a maximum does
        if (is_product or compares) and decision.output.state == "low" and node.inputs[0] in self._unrounded:
            return decision._replace(format="float32", reason="like its forward operation", anew=("saturated",))
        if is_backward and decision.format == "float32" and decision.output.state == "strong":
            return decision._replace(anew=(*decision.anew, "saturated"))  # like the operation that made the gradient
        return decision

    def _is_gradient_of_low(self, node: Node) -> bool:
        """Return whether a node adds the gradients of a low value."""
        # The backward pass does not tell which value a gradient belongs to. The kernel of an activation's or norm's
        # gradient takes the value beside it. A product takes it beside an operand of a forward product, and this leads
        # to the value.
        takers = [one for value in node.outputs for one in self._takers[value]]
        makers = [
            one for taker in takers if taker.op != "AddN" and (one := self.scopes.forward_node(taker)) is not None
        ]
        if node.op != "AddN" or any(self._is_normalized(one) for one in makers):
            return False
        readers = closure([node], functools.partial(self._readers, is_backward=True))
        taken = [(one, value) for one in readers for value in one.inputs if not self._is_backward(value)]
        pairs = {one for taker, value in taken if self._is_product(taker) for one in self._forward(value)}
        made = closure(pairs, functools.partial(self._readers, is_backward=False))
        results = [one.outputs[0] for one in made if one in pairs or OPERATIONS.get(one.op) == "add"]
        kept = [value for one, value in taken if "Grad" in one.op and value not in self._unrounded]
        found = [self.known[value].value for value in results or kept if value in self.known]
        return any(value.state == "low" for value in found) and not any(
            value.state == "strong" or value.role == "average" for value in found
        )

    def _is_normalized(self, node: Node) -> bool:
        known = [self.known[value].value for value in node.outputs if value in self.known]
        return any(value.role == "normalized" for value in known)

    def _readers(self, node: Node, *, is_backward: bool) -> list[Node]:
        """Return a node's readers, if the node only moves, masks or adds, or is a forward product; else nothing."""
        weak = [value for value in node.inputs if value in self.known and self.known[value].value.state == "weak"]
        moves = OPERATIONS.get(node.op) in _MOVING or node.op in ("AddN", "BiasAdd") or (node.op == "Mul" and weak)
        passes = moves or (not is_backward and self._is_product(node))
        readers = [one for value in node.outputs for one in self._takers[value] if passes]
        return [one for one in readers if (one.name in self.parts.backward) is is_backward]

    def _forward(self, value: str) -> list[Node]:
        """Return the products of the forward pass that take a value."""
        return [one for one in self._takers[value] if one.name not in self.parts.backward and self._is_product(one)]

    def _is_product(self, node: Node) -> bool:
        return self.class_of(node, self._specific(node)).op_class == "lower"

    def _is_backward(self, value: str) -> bool:
        maker = self.graph.maker.get(value)
        return maker is not None and maker.name in self.parts.backward

    def _without_kernel(self, node: Node, decision: Decision) -> TypedNode:
        missing = f"no {self.program.compute} kernel for {node.op} on {device_of(node)}"
        state = decision.output if decision.op_class == "inner" else WEAK
        if decision.rule:
            state = Value("strong", decision.operation)
            self.program.refuse(f"there is {missing}, so it runs in float32", decision)
        return self.typed(node, decision._replace(format="float32", output=state, reason=missing, anew=()))


def _value_of_output(node: Node, port: Port, decision: Decision) -> Value:
    """Return the state of a float32 output. A norm's outputs other than its data are statistics."""
    is_first = port is node.output_ports[0]
    is_data = port.attribute == node.output_ports[0].attribute and (is_first or decision.operation != "batch_norm")
    if is_data or decision.output.state != "low":
        return decision.output
    return Value("strong", decision.operation, role="statistic")


# Nodes that the flow rule alone does not decide: constants, casts, sizes, and the edges of loops.


def _constant(decisions: Pass, node: Node) -> TypedNode:
    tensor = node.definition.attr["value"].tensor
    value = WEAK
    if tensor.dtype == FLOAT32:
        divides = decisions.is_divisor(node.outputs[0])
        value = decisions.program.table(tf.make_ndarray(tensor), divides=divides)
    return decisions.as_written(node, TABLE, value)


def _cast(decisions: Pass, node: Node) -> TypedNode:
    """Decide a cast. Integers that become float32 count as the user's inputs; booleans do not."""
    if node.input_ports[0].dtype in FLOATING or node.output_ports[0].dtype != FLOAT32:
        return decisions.by_flow(node)
    known, maker = decisions.inputs_of(node)[0], decisions.graph.maker.get(node.inputs[0])
    is_scalar = known.is_constant and decisions.elements(node.inputs[0]) == 1  # such as a size that TensorFlow knows
    largest = 0 if is_scalar else decisions.integers.largest(node.inputs[0])
    return decisions.as_written(node, TABLE, value_of_cast(node, known.value, maker, decisions.program, largest))


def _range(decisions: Pass, node: Node) -> TypedNode:
    """Decide a range: leave it as written, since its numbers are exact."""
    largest = decisions.integers.largest(node.outputs[0])
    return decisions.as_written(node, TABLE, decisions.program.integers(WEAK, largest))


def _shape(decisions: Pass, node: Node) -> TypedNode:
    """Decide a node that reads sizes, and so takes values without casts."""
    decided = decisions.by_flow(node)
    low = decisions.program.low
    types = {known.dtype for known in decisions.inputs_of(node)}
    if types != {low} or any(port.attribute != "T" or port.dtype != FLOAT32 for port in node.input_ports):
        return decided
    changes = {"T": tf.compat.v1.AttrValue(type=low)}
    return decided._replace(input_types=[low] * len(node.input_ports), changes=changes)


def _identities(decisions: Pass, node: Node) -> TypedNode:
    """Decide a node that moves several values without casts."""
    knowns = decisions.inputs_of(node)
    types = [known.dtype for known in knowns]
    decided = decisions.as_written(node, TABLE)._replace(results=knowns)
    if types == [port.dtype for port in node.input_ports]:
        return decided
    listed = tf.compat.v1.AttrValue(list=tf.compat.v1.AttrValue.ListValue(type=types))
    decision = decided.decision._replace(format=decisions.program.compute, reason="moves values")
    return decided._replace(input_types=types, changes={"T": listed}, decision=decision)


def _merge(decisions: Pass, node: Node) -> TypedNode:
    """Decide a merge. The head of a loop is float32, because its values can add up; other merges only move values."""
    makers = [decisions.graph.maker[value] for value in node.inputs]
    if any(map(closes_loop, makers)):
        return decisions.as_written(node, "carried by a loop", CARRIED)
    return decisions.by_flow(node)


def _loop_edge(decisions: Pass, node: Node) -> TypedNode:
    """Decide an edge into a loop or to a next iteration: but for constants, it has the type of the loop's head."""
    if node.op == "Enter" and node.definition.attr["is_constant"].b:
        return decisions.by_flow(node)
    return decisions.as_written(node, "carried by a loop", CARRIED)


_SPECIAL: dict[str, Callable[[Pass, Node], TypedNode]] = {
    "Cast": _cast,
    "Const": _constant,
    "Enter": _loop_edge,
    "IdentityN": _identities,
    "Merge": _merge,
    "NextIteration": _loop_edge,
    "Range": _range,
    **dict.fromkeys(("Rank", "Shape", "ShapeN", "Size"), _shape),
}
