"""Run a decided step node by node, in eager code, and record the values that its nodes compute.

For example, ``exp(x @ w)`` under mixed_float16 runs as ``MatMul`` on ``x`` and ``w`` cast to float16, then ``Exp`` on
the product cast to float32: what `polyamp.rewrite` writes into a graph. In a widened run there are no 16 bits: every
node computes in float32, also where the step itself casts to 16 bits.

Values that depend on the seed of a backward pass are gradients and proportional to the loss scale; no others are. For
example, the backward pass of a squared error computes ``2 * (prediction - target)``. It is a factor of a gradient, and
the loss scale does not change it, so it is recorded as an activation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from polyamp.backends.tensorflow.graphs.decisions import Inside, Pass, TypedNode
from polyamp.backends.tensorflow.graphs.graph import FLOAT32, FLOATING, Node, closure, maker_name
from polyamp.backends.tensorflow.graphs.writing import RESULT
from polyamp.backends.tensorflow.recording.step import Taken
from polyamp.backends.tensorflow.unstable import dataset_of, elements_of, run_operation
from polyamp.diagnosis.recording import ACTIVATION, GRADIENT, PARAMETER, Kind, Observation
from polyamp.diagnosis.spread import Spread, stride
from polyamp.operations import OPERATIONS as TABLE

_FLOATS = {kind.as_datatype_enum: kind.name for kind in (tf.float16, tf.bfloat16, tf.float32, tf.float64)}
_LOW = tuple(kind.as_datatype_enum for kind in (tf.float16, tf.bfloat16))
_OUTSIDE = ("Bitcast", "DecodeRaw", "EagerPyFunc", "PyFunc", "PyFuncStateless")  # their values are in 16 bits
_RESOURCE: int = tf.resource.as_datatype_enum
_CARRYING = frozenset({*FLOATING, tf.variant.as_datatype_enum})  # types of gradients; a list of them is a variant
_INFINITE = 0x7F800000  # float32's bits without the sign: those of finite numbers are smaller, those of NaN larger
_COMPUTING = ("lower", "full", "promote", "follow")
_UNSEEN = ("custom_call", "call", "cond", "while_loop")  # perhaps only their results are known, not what is inside
_HANDING = ("Iterator", "Optional", "TensorArray", "Unstage")  # they hold values and are not in the table
_ORDER = (ACTIVATION, GRADIENT, PARAMETER)


class Place(NamedTuple):
    """The key of an observation: equal in all runs of a function's body that was decided once."""

    body: int  # the id of the decisions for it
    value: str
    kind: Kind = ACTIVATION
    position: int = 0  # of a parameter's gradient, among all of the step


class Origin(NamedTuple):
    """The operation that computed a value, before casts and moves."""

    place: Place
    op_class: str
    format: str


class Evaluated(NamedTuple):
    """A value while the step runs."""

    tensor: Any
    is_gradient: bool = False  # whether it depends on the seed of a backward pass
    varies: bool = True  # whether it depends on arguments or variables, not only on constants and random bits
    origin: Origin | None = None  # None for an argument


class Marks(NamedTuple):
    """Which values of a graph are losses and gradients, which start a backward pass, and which lead to these."""

    losses: list[str]
    gradients: dict[str, tuple[int, str]]  # those of variables, each with its position and the variable's name
    seeds: set[str]  # the values that backward passes start from
    used: set[str]  # what losses and gradients are computed from; in a graph without them, what its results are


class Replay:
    """A run of a step, which reads and writes its variables."""

    def __init__(self, taken: Sequence[Taken], *, widened: bool) -> None:
        self._taken, self._widened = taken, widened
        self._marks: dict[int, Marks] = {}
        self._newest: dict[Place, Observation] = {}  # those of the last run of each body
        self._earlier: dict[Place, Spread] = {}
        self._of_parameters: set[Place] = set()  # the places whose values are recorded as parameters' gradients

    def step(self, decisions: Pass, arguments: Iterable[Any]) -> Any:
        """Run the outermost graph up to its gradients, and return the loss; None if the graph has none."""
        marks, nodes = self._marks_of(decisions), {decided.node.name: decided.node for decided in decisions.nodes}
        calls = [decided.node.name for decided in decisions.nodes if any(map(self._takes, decided.inside))]
        last = [*map(maker_name, (*marks.losses, *marks.gradients)), *calls] or nodes.keys() - decisions.parts.update
        needed = closure(last, lambda name: map(maker_name, nodes[name].definition.input) if name in nodes else ())
        values = self._run(decisions, map(Evaluated, arguments), needed)
        return values[marks.losses[0]].tensor if marks.losses else None

    def observations(self) -> list[Observation]:
        """Return what was recorded: activations and gradients in order of computation, then parameters' gradients."""
        found = []
        for place, one in sorted(self._newest.items(), key=lambda item: (_ORDER.index(item[0].kind), item[0].position)):
            if place.kind == PARAMETER or Place(*place[:2]) not in self._of_parameters:
                earlier = self._earlier.get(place)
                found.append(one if earlier is None else one._replace(spread=earlier.merged(one.spread)))
        return found

    def _takes(self, inside: Inside) -> bool:
        """Return whether a function takes gradients, or calls one that does."""
        parts = (part for decided in inside.decisions.nodes for part in decided.inside)
        return bool(self._marks_of(inside.decisions).gradients) or any(map(self._takes, parts))

    def _marks_of(self, decisions: Pass) -> Marks:
        if id(decisions) not in self._marks:
            self._marks[id(decisions)] = marks_of(decisions, self._taken)
        return self._marks[id(decisions)]

    def _run(
        self, decisions: Pass, arguments: Iterable[Evaluated], needed: set[str] | None = None
    ) -> dict[str, Evaluated]:
        """Run the nodes of a body, or those that are needed, and return all values by name."""
        seeds = self._marks_of(decisions).seeds
        values = {
            name: Evaluated(self._widen(one.tensor), one.is_gradient or name in seeds)
            for (name, _), one in zip(decisions.graph.arguments, arguments, strict=True)
        }
        for decided in decisions.nodes:
            if needed is None or decided.node.name in needed:
                results = self._results(decisions, decided, values)
                values.update(zip(decided.node.outputs, results, strict=True))
                self._record(decisions, decided, values)
        return values

    def _results(self, decisions: Pass, decided: TypedNode, values: Mapping[str, Evaluated]) -> list[Evaluated]:
        node, seeds = decided.node, self._marks_of(decisions).seeds
        types, attributes = decided.input_types, {**node.definition.attr, **decided.changes}
        if self._widened:
            stays = _stays(node) and not decided.inside
            types = [port.dtype if stays else _wide(port.dtype) for port in node.input_ports]
            attributes = {key: one if stays else _in_float32(one) for key, one in node.definition.attr.items()}
        pairs = zip(node.inputs, types, strict=True)
        tensors = [self._cast(decisions, values, value, dtype, decided.decision.anew) for value, dtype in pairs]
        self._note_rounded(decisions, decided, values)
        given = [values[value]._replace(tensor=tensor) for value, tensor in zip(node.inputs, tensors, strict=True)]
        varies = decided.operation != "random" and any(one.varies for one in given)
        if decided.inside:
            made = self._called(decided, given)
        else:
            depends = any(one.is_gradient for one in given)
            results = map(self._widen, run_operation(node.definition, tensors, attributes, len(node.outputs)))
            made = [
                Evaluated(
                    tensor, depends and port.dtype in _CARRYING, varies, _origin(decisions, decided, place, given)
                )
                for place, (tensor, port) in enumerate(zip(results, node.output_ports, strict=True))
            ]
        return [
            one._replace(is_gradient=one.is_gradient or value in seeds, varies=varies)
            for value, one in zip(node.outputs, made, strict=True)
        ]

    def _called(self, decided: TypedNode, inputs: list[Evaluated]) -> list[Evaluated]:
        if decided.operation == "call":
            return self._returned(decided.inside[0], inputs)
        if decided.operation == "cond":
            last, chosen = len(decided.inside) - 1, int(inputs[0].tensor)
            place = int(not chosen) if "then_branch" in decided.node.definition.attr else chosen
            return self._returned(decided.inside[place if 0 <= place < last else last], inputs[1:])
        if decided.node.op.endswith("Dataset"):
            return self._iterated(decided, inputs)
        condition, iteration = decided.inside
        while bool(self._returned(condition, inputs)[0].tensor):
            inputs = self._returned(iteration, inputs)
        return inputs

    def _iterated(self, decided: TypedNode, inputs: list[Evaluated]) -> list[Evaluated]:
        """Run ``for batch in dataset``; the body takes carried values, an element and captured values."""
        attributes, (inside,) = decided.node.definition.attr, decided.inside
        carried, captured = (len(attributes[name].list.type) for name in ("Tstate", "Targuments"))
        state, others = inputs[1 : 1 + carried], inputs[1 + carried :]
        types = [dtype for _, dtype in inside.decisions.graph.arguments][carried:][: -captured or None]
        made: list[list[Any]] = []
        for element in elements_of(inputs[0].tensor, types):
            results = self._returned(inside, [*state, *map(Evaluated, element), *others])
            state = results[:carried]
            made.append([one.tensor for one in results[carried:]])
        if decided.node.op == "ReduceDataset":
            return state
        return [Evaluated(dataset_of(made)) if made else inputs[0]]

    def _returned(self, inside: Inside, arguments: Sequence[Evaluated]) -> list[Evaluated]:
        decisions = inside.decisions
        values = self._run(decisions, arguments)
        types = [_wide(dtype) if self._widened else dtype for dtype in inside.results]
        return [
            values[value]._replace(tensor=self._cast(decisions, values, value, dtype, RESULT))
            for value, dtype in zip(decisions.graph.returns, types, strict=True)
        ]

    def _cast(
        self, decisions: Pass, values: Mapping[str, Evaluated], value: str, dtype: int, anew: Sequence[str]
    ) -> Any:
        """Return a value in a type; in float32, computed again if its role is in ``anew``."""
        tensor = values[value].tensor
        if tensor.dtype.as_datatype_enum == dtype:
            return tensor
        maker = decisions.computed_anew(value, anew) if dtype == FLOAT32 else None
        if maker is None:
            return tf.cast(tensor, dtype)
        inputs = [self._cast(decisions, values, one, wanted, anew) for one, wanted in maker.typed_inputs]
        return run_operation(maker.definition, inputs, maker.definition.attr, 1)[0]

    def _widen(self, tensor: Any) -> Any:
        is_low = self._widened and tensor.dtype.as_datatype_enum in _LOW
        return tf.cast(tensor, tf.float32) if is_low else tensor

    def _record(self, decisions: Pass, decided: TypedNode, values: Mapping[str, Evaluated]) -> None:
        """Record the results of a node: those that it computes, and those that are gradients of variables."""
        node, marks, parts = decided.node, self._marks_of(decisions), decisions.parts
        is_apart = decided.inside or node.name in parts.update or node.name in parts.averaging
        for value in () if is_apart or not _computes(decided) else node.outputs:
            one, dtype = values[value], decisions.known[value].dtype
            if value in marks.used and (one.is_gradient or one.varies) and dtype in _FLOATS:
                kind, where = GRADIENT if one.is_gradient else ACTIVATION, decisions.scopes.scope_of(node)
                self._add(Place(id(decisions), value, kind), one, decided.operation, where)
        for value in marks.gradients.keys() & node.outputs:
            position, name = marks.gradients[value]
            self._add(Place(id(decisions), value, PARAMETER, position), values[value], name, "")
            origin = values[value].origin
            self._of_parameters |= set() if origin is None else {origin.place}

    def _add(self, place: Place, one: Evaluated, name: str, where: str) -> None:
        origin, spread = one.origin, spread_of(one.tensor.numpy())
        op_class, format_name = ("keep", "float32") if origin is None else origin[1:]
        if place in self._newest:
            earlier, newest = self._earlier.get(place), self._newest[place].spread
            self._earlier[place] = newest if earlier is None else earlier.merged(newest)
        shape = tuple(one.tensor.shape)
        self._newest[place] = Observation(place.kind, name, where, op_class, format_name, shape, spread)

    def _note_rounded(self, decisions: Pass, decided: TypedNode, values: Mapping[str, Evaluated]) -> None:
        """Record in 16 bits the float32 values of this body that a node takes in 16 bits."""
        for value, dtype in zip(decided.node.inputs, decided.input_types, strict=True):
            tensor, is_gradient, _, origin = values[value]
            if dtype not in _LOW or decisions.known[value].dtype != FLOAT32 or origin is None:
                continue
            place = origin.place._replace(kind=GRADIENT if is_gradient else ACTIVATION)
            if place.body == id(decisions) and place in self._newest:
                spread = spread_of((tensor if self._widened else tf.cast(tensor, dtype)).numpy())
                found = {"format": _FLOATS[dtype], "shape": tuple(tensor.shape), "spread": spread}
                self._newest[place] = self._newest[place]._replace(**found)


def marks_of(decisions: Pass, taken: Sequence[Taken]) -> Marks:
    """Return which values of one graph are the losses and gradients of the steps that it takes."""
    graph, traced = decisions.graph, decisions.traced
    named = {node.name: node for node in graph.nodes}
    inputs = zip(graph.arguments, getattr(traced, "inputs", ()), strict=False)
    arguments = {id(given): name for (name, _), given in inputs}

    def values_of(tensors: Iterable[Any]) -> list[str]:
        here = [one for one in tensors if one.graph is traced]
        made = (named[one.op.name].outputs[one.value_index] for one in here if one.op.name in named)
        return [*made, *(arguments[id(one)] for one in here if id(one) in arguments)]

    grads = [pair for one in taken for pair in zip(one.names, one.grads, strict=True)]
    found = [(value, (place, name)) for place, (name, grad) in enumerate(grads) for value in values_of([grad])]
    losses = values_of(one.loss for one in taken)
    effects = (value for node in graph.nodes if not node.outputs for value in node.inputs)
    roots = [*losses, *dict(found)] or [*graph.returns, *effects]
    return Marks(
        losses,
        dict(reversed(found)),
        set(values_of(seed for one in taken for seed in one.seeds)),
        graph.made_from(roots),
    )


def _origin(decisions: Pass, decided: TypedNode, place: int, given: Sequence[Evaluated]) -> Origin | None:
    if given and not _computes(decided):
        return given[0].origin
    entry, op_class = TABLE.get(decided.operation), decided.decision.op_class
    op_class = entry.op_class if op_class == "keep" and entry is not None else op_class  # also of one in the update
    dtype = decided.results[place].dtype
    return Origin(Place(id(decisions), decided.node.outputs[place]), op_class, _FLOATS.get(dtype, "float32"))


def _computes(decided: TypedNode) -> bool:
    """Return whether a node computes values, instead of moving, casting or receiving them."""
    entry = TABLE.get(decided.operation)
    if entry is None:
        return not decided.node.op.startswith(_HANDING)
    return entry.op_class in _COMPUTING or decided.operation in _UNSEEN


def _stays(node: Node) -> bool:
    """Return whether the types of a node's values are fixed by something outside the graph."""
    return (
        bool(node.called)
        or node.op in _OUTSIDE
        or any(port.dtype == _RESOURCE or port.dtype > 100 for port in node.input_ports)
    )


def _wide(dtype: int) -> int:
    return FLOAT32 if dtype in _LOW else dtype


def _in_float32(attribute: Any) -> Any:
    """Return an attribute of a node with float32 in place of 16-bit types."""
    if attribute.type in _LOW:
        return tf.compat.v1.AttrValue(type=FLOAT32)
    if attribute.list.type:
        types = tf.compat.v1.AttrValue.ListValue(type=map(_wide, attribute.list.type))
        return tf.compat.v1.AttrValue(list=types)
    return attribute


def spread_of(array: Any) -> Spread:
    """Return the spread of an array on the host."""
    with np.errstate(over="ignore"):  # float64 numbers beyond float32 are inf there
        values = np.ravel(array).astype(np.float32)
    bits = values.view(np.int32) & 0x7FFFFFFF
    inf, nan = (int(np.count_nonzero(found)) for found in (bits == _INFINITE, bits > _INFINITE))
    largest = float(bits[bits < _INFINITE].max(initial=0).view(np.float32))
    return Spread.of_sample(bits.size, values[:: stride(bits.size)], inf, nan, largest)
