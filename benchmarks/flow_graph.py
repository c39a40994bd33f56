"""A traced JAX function as one flat list of operations on float32 values, each with the flow rule's decision.

Calls and loops are replaced by their bodies; the bytes of a loop's body count for all its turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from polyamp.backends.jax import unstable
from polyamp.backends.jax.graphs.cells import is_inexact
from polyamp.backends.jax.graphs.handlers import HANDLERS
from polyamp.backends.jax.operations import canonical
from polyamp.flow import AS_WRITTEN, Flow, Value, constant, flow, specific
from polyamp.rules import decide

FLOAT32 = np.dtype("float32")
CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
LOOP = Value("strong", "loop")
MOVES = ("reshape", "squeeze", "copy", "name", "stop_gradient")  # the same numbers in the same order


@dataclass(eq=False)
class Operation:
    """One operation, or an edge of the graph: an input, a constant, an output, or a value that a loop carries.

    Attributes:
        op_class: its class in the table; ``edge`` for an edge.
        bytes: size of its float32 inputs and outputs, in float32, over all turns.
        flow: the flow rule's decision.
        fixed: the only format that is safe for it; None if both are.
        times: number of runs.
    """

    native: str
    op_class: str
    flow: Flow
    fixed: str | None
    times: int = 1
    bytes: int = 0
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    @property
    def makers(self) -> list[Operation]:
        return [tensor.maker for tensor in self.inputs]

    @property
    def users(self) -> list[Operation]:
        return [user for tensor in self.outputs for user in tensor.users]


@dataclass(eq=False)
class Tensor:
    """One floating-point value as used inside or outside a loop's body: apart, since casts are not moved out.

    Attributes:
        maker: the operation that decides its format.
        bytes: size in float32, over all turns; 0 for numbers written into the program and for other types.
        value: the flow rule's knowledge of it.
        constant: whether it is computed from constants alone.
        same: an identity that tensors with the same numbers share.
    """

    maker: Operation
    bytes: int
    value: Value
    users: list[Operation] = field(default_factory=list)
    constant: bool = False
    same: Any = field(default_factory=object)

    def __post_init__(self) -> None:
        self.maker.outputs.append(self)


class Graph:
    """The operations in the order in which they run; edges that make values come first."""

    def __init__(self, compute: str = "bfloat16") -> None:
        self.compute = compute
        self.operations: list[Operation] = []

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for operation in self.operations for tensor in operation.outputs]

    def add(self, operation: Operation, inputs: Sequence[Tensor]) -> Operation:
        self.operations.append(operation)
        operation.inputs += inputs
        for tensor in inputs:
            tensor.users.append(operation)
        return operation

    def edge(self, native: str, *inputs: Tensor) -> Operation:
        """Return an operation that is always float32, and moves nothing but its casts."""
        return self.add(Operation(native, "edge", Flow("float32", Value(), native), "float32"), inputs)


def program(function: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], list[Any]]:
    """Return a call as a function of a list of parameters and a list of other arrays, with both lists.

    Traced operations that no result needs are left out: derivatives of ``jax.numpy`` functions leave some, which XLA
    drops.
    """
    jaxpr, constants = unstable.opened(jax.make_jaxpr(function)(*args))
    jaxpr, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    given = [jax.tree.leaves(args[0]), *jax.tree.leaves(args[1:])]
    return lambda params, *arrays: jax.core.eval_jaxpr(jaxpr, constants, *params, *arrays), given


def traced(function: Callable[..., Any], arrays: Sequence[Any], compute: str) -> Graph:
    """Return the graph of a function of parameters and arrays that returns a list of arrays."""
    closed = jax.make_jaxpr(function)(*arrays)
    graph, parameters = Graph(compute), len(arrays[0])
    inputs = [_given(graph, variable, "input") for variable in unstable.opened(closed)[0].invars]
    for tensor in filter(None, inputs[parameters:]):
        tensor.value = Value("input") if tensor.value.state == "weak" else tensor.value
    for tensor in filter(None, _Walk(graph, 1).run(closed, inputs)):
        graph.edge("output", tensor)
    return graph


@dataclass(frozen=True)
class _Walk:
    """Appends the operations of jaxprs to a graph. Values that are not floating-point are None."""

    graph: Graph
    times: int

    def run(self, closed: Any, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        jaxpr, constants = unstable.opened(closed)
        known = {
            variable: _given(self.graph, variable, "constant", np.asarray(array))
            for variable, array in zip(jaxpr.constvars, constants, strict=True)
        }
        known.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Tensor | None:
            return self._literal(atom) if isinstance(atom, unstable.Literal) else known[atom]

        for equation in jaxpr.eqns:
            outputs = self._equation(equation, [read(atom) for atom in equation.invars])
            known.update(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: Any, inputs: list[Tensor | None]) -> list[Tensor | None]:
        name, params = equation.primitive.name, equation.params
        if name in CALLS:
            return self.run(params[CALLS[name]], inputs)
        if name == "scan":
            return self._scan(equation, inputs)
        if name == "optimization_barrier" or _casts_nothing(equation):
            return inputs
        if name == "convert_element_type" and _is_of_integers(equation):
            return [_given(self.graph, equation.outvars[0], "input", state="input")]
        if name in HANDLERS and name != "convert_element_type":
            raise NotImplementedError(f"a graph is without branches and open-ended loops, and cannot hold {name}")
        return self._operation(equation, inputs)

    def _operation(self, equation: Any, inputs: list[Tensor | None]) -> list[Tensor | None]:
        floats = [tensor for tensor in inputs if tensor is not None]
        name = _named(equation, floats if len(floats) == len(inputs) else [])
        decision = decide((), name)
        known = [tensor.value for tensor in floats]
        decided = flow(name, decision, known, self.graph.compute) if known else Flow(AS_WRITTEN, Value(), "no float")
        bound = "update_jaxpr" in equation.params  # traced in float32, so it cannot be bound in another format
        fixed = "float32" if bound or any(value.unfit for value in known) else _safe(decided, decision.op_class)
        op_class = "keep" if bound or not known else decision.op_class
        operation = self.graph.add(Operation(equation.primitive.name, op_class, decided, fixed, self.times), floats)
        outputs = [self._tensor(operation, variable, decided.output) for variable in equation.outvars]
        _remember(equation, inputs, outputs)
        read = sum(_bytes(atom) for atom in equation.invars if not isinstance(atom, unstable.Literal))
        operation.bytes = (read + sum(map(_bytes, equation.outvars))) * self.times
        return outputs

    def _scan(self, equation: Any, inputs: list[Tensor | None]) -> list[Tensor | None]:
        params, inside = equation.params, _Walk(self.graph, self.times * equation.params["length"])
        held, carried = unstable.loop_parts(params)
        first = inputs[held : held + carried]
        trial = _Walk(Graph(self.graph.compute), inside.times)
        found = trial._turn(equation, [trial._apart(tensor) for tensor in inputs], [LOOP] * carried)[0]
        values = [
            LOOP
            if tensor is None or start is None or start.value.unfit or tensor.value.state != "low"
            else tensor.value
            for start, tensor in zip(first, found, strict=False)
        ]
        outputs, loops = inside._turn(equation, inputs, values)
        for start, loop, tensor in zip(first, loops, outputs, strict=False):
            for value in filter(None, (start, tensor)):
                loop.inputs.append(value)
                value.users.append(loop)
        last = [self._tensor(*each) for each in zip(loops, equation.outvars, values, strict=False)]
        return [*last, *map(self._same, outputs[carried:], equation.outvars[carried:])]

    def _turn(
        self, equation: Any, inputs: list[Tensor | None], values: Sequence[Value]
    ) -> tuple[list[Tensor | None], list[Operation]]:
        """Return the results of all turns of a loop, and its edges, one for each value that it carries."""
        held, carried = unstable.loop_parts(equation.params)
        variables = unstable.opened(equation.params["jaxpr"])[0].invars
        loops = [self._loop(value) for value in values]
        turn = [*map(self._held, inputs[:held], variables)]
        turn += [self._tensor(*each) for each in zip(loops, variables[held:], values, strict=False)]
        turn += map(self._same, inputs[held + carried :], variables[held + carried :])
        return self.run(equation.params["jaxpr"], turn), loops

    def _loop(self, value: Value) -> Operation:
        is_low = value.state == "low"
        decided = Flow(self.graph.compute if is_low else "float32", value, "loop")
        return self.graph.add(Operation("loop", "edge", decided, "low" if is_low else "float32"), [])

    def _apart(self, tensor: Tensor | None) -> Tensor | None:
        """Return a value for a trial, which leaves the graph unchanged."""
        return None if tensor is None else Tensor(self.graph.edge("trial"), tensor.bytes, tensor.value)

    def _held(self, tensor: Tensor | None, variable: Any) -> Tensor | None:
        """Return a loop's constant, which is cast in each turn: else its gradients would add up in 16 bits."""
        if tensor is None:
            return None
        value = Value() if tensor.value.state == "low" else tensor.value
        return Tensor(self.graph.edge("held", tensor), _bytes(variable) * self.times, value)

    def _literal(self, literal: Any) -> Tensor | None:
        tensor = _given(self.graph, literal, "constant", np.asarray(literal.val))
        if tensor is not None:
            tensor.bytes, tensor.constant = 0, True
        return tensor

    def _same(self, tensor: Tensor | None, variable: Any) -> Tensor | None:
        """Return a value on the other side of a loop's edge, in the format in which it was made."""
        return None if tensor is None else Tensor(tensor.maker, _bytes(variable) * self.times, tensor.value)

    def _tensor(self, maker: Operation, variable: Any, value: Value) -> Tensor | None:
        dtype = unstable.dtype_in(variable)
        if not is_inexact(dtype):
            return None
        known = value if dtype == FLOAT32 else Value("other", np.dtype(dtype).name)
        return Tensor(maker, _bytes(variable) * self.times, known)


def _named(equation: Any, inputs: Sequence[Tensor]) -> str:
    """Return the canonical name of an operation, which can depend on its operands."""
    name = canonical(equation.primitive.name, equation.params)
    if len(inputs) != 2:
        return name
    one, other = inputs
    shapes = [getattr(atom.aval, "shape", ()) for atom in equation.invars]
    is_same = one.same is other.same and shapes[0] == shapes[1]
    return specific(name, of_itself=is_same, over=one.constant and not other.constant)


def _remember(equation: Any, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None]) -> None:
    """Record whether results are constants, and which other values they equal."""
    for tensor in filter(None, outputs):
        tensor.constant = bool(inputs) and all(value is not None and value.constant for value in inputs)
    name, sizes = (
        equation.primitive.name,
        [math.prod(each.aval.shape) for each in (*equation.invars, *equation.outvars)],
    )
    moves = name in MOVES or (name == "broadcast_in_dim" and sizes[0] == sizes[-1])
    if moves and inputs[0] is not None and outputs[0] is not None:
        outputs[0].same = inputs[0].same


def _is_of_integers(equation: Any) -> bool:
    """Return whether it makes float32 from integers, such as labels or positions."""
    (given,), (made,) = equation.invars, equation.outvars
    return np.issubdtype(unstable.dtype_in(given), np.integer) and unstable.dtype_in(made) == FLOAT32


def _given(graph: Graph, variable: Any, native: str, array: Any = None, state: str = "weak") -> Tensor | None:
    dtype = unstable.dtype_in(variable)
    if not is_inexact(dtype):
        return None
    value = Value(state) if dtype == FLOAT32 else Value("other", np.dtype(dtype).name)
    if array is not None and dtype == FLOAT32:
        largest = np.max(np.abs(array), initial=0, where=np.isfinite(array)) if array.ndim else array
        value = constant([float(largest)], graph.compute)
    return Tensor(graph.edge(native), _bytes(variable), value, constant=array is not None)


def _safe(decided: Flow, op_class: str) -> str | None:
    """Return the only safe format of an operation; None if both are safe."""
    if op_class == "lower":
        return "low" if decided.output.state == "low" else "float32"
    strong = decided.format == AS_WRITTEN or decided.output.state == "strong" or op_class == "full"
    inside = decided.format == "float32" and decided.output.state == "low"  # part of a norm that is written out
    return "float32" if strong or inside else None


def _casts_nothing(equation: Any) -> bool:
    """Return whether it makes float32 from float32, as when only the weakness of a type changes."""
    types = {unstable.dtype_in(variable) for variable in (*equation.invars, *equation.outvars)}
    return equation.primitive.name == "convert_element_type" and types == {FLOAT32}


def _bytes(atom: Any) -> int:
    return math.prod(atom.aval.shape) * 4 if unstable.dtype_in(atom) == FLOAT32 else 0
