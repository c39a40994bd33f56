"""Run a decided step node by node, in eager code, and count the values that are recorded.

For example, ``exp(x @ w)`` under mixed_float16 runs as ``MatMul`` on ``x`` and ``w`` cast to float16, then ``Exp`` on
the product cast to float32: what `polyamp.rewrite` writes into a graph. In a widened run there are no 16 bits: every
node computes in float32, also where the step itself casts to 16 bits.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from polyamp.backends.tensorflow.graphs.decisions import Inside, TypedNode
from polyamp.backends.tensorflow.graphs.graph import FLOAT32, Node, closure, maker_name
from polyamp.backends.tensorflow.graphs.writing import RESULT
from polyamp.backends.tensorflow.recording.values import LOW, Body
from polyamp.backends.tensorflow.unstable import dataset_of, elements_of, run_operation
from polyamp.diagnosis.spread import Spread, stride

_OUTSIDE = ("Bitcast", "DecodeRaw", "EagerPyFunc", "PyFunc", "PyFuncStateless")  # their values are in 16 bits
_RESOURCE: int = tf.resource.as_datatype_enum
_INFINITE = 0x7F800000  # float32's bits without the sign: those of finite numbers are smaller, those of NaN larger


class Replay:
    """A run of a step, which reads and writes its variables."""

    def __init__(self, *, widened: bool) -> None:
        self.counted: dict[tuple[Body, str], tuple[tuple[int, ...], Spread]] = {}  # shape and spread of each value
        self._widened = widened

    def step(self, body: Body, arguments: Sequence[Any], wanted: Sequence[str]) -> list[Any]:
        """Run the outermost body as far as values are recorded or wanted, and return the wanted ones."""
        nodes = {decided.node.name: decided.node for decided in body.decisions.nodes}
        last = [*map(maker_name, (*wanted, *body.recorded)), *filter(body.records_inside, nodes)]
        needed = closure(last, lambda name: map(maker_name, nodes[name].definition.input) if name in nodes else ())
        values = self._values(body, arguments, needed)
        return [values[value] for value in wanted]

    def _values(self, body: Body, arguments: Sequence[Any], needed: Container[str] | None = None) -> dict[str, Any]:
        """Run the nodes of a body, or those that are needed, and return all values by name."""
        names = (name for name, _ in body.decisions.graph.arguments)
        values = dict(zip(names, map(self._widen, arguments), strict=True))
        for decided in body.decisions.nodes:
            node = decided.node
            if needed is not None and node.name not in needed:
                continue
            values.update(zip(node.outputs, self._results(body, decided, values), strict=True))
            for value in body.recorded.intersection(node.outputs):
                self._count(body, value, values[value])
        return values

    def _results(self, body: Body, decided: TypedNode, values: Mapping[str, Any]) -> Sequence[Any]:
        node = decided.node
        types, attributes = decided.input_types, {**node.definition.attr, **decided.changes}
        if self._widened:
            stays = _stays(node) and not decided.inside
            types = [port.dtype if stays else _wide(port.dtype) for port in node.input_ports]
            attributes = {key: one if stays else _in_float32(one) for key, one in node.definition.attr.items()}
        pairs = zip(node.inputs, types, strict=True)
        inputs = [self._cast(body, values, value, dtype, decided.decision.anew) for value, dtype in pairs]
        if decided.inside:
            return self._called(body.inside[node.name], decided, inputs)
        return list(map(self._widen, run_operation(node.definition, inputs, attributes, len(node.outputs))))

    def _called(self, bodies: Sequence[Body], decided: TypedNode, inputs: list[Any]) -> list[Any]:
        if decided.operation == "call":
            return self._returned(bodies[0], decided.inside[0], inputs)
        if decided.operation == "cond":
            last, chosen = len(bodies) - 1, int(inputs[0])
            place = int(not chosen) if "then_branch" in decided.node.definition.attr else chosen
            place = place if 0 <= place < last else last
            return self._returned(bodies[place], decided.inside[place], inputs[1:])
        if decided.node.op.endswith("Dataset"):
            return self._iterated(bodies[0], decided, inputs)
        condition, iteration = zip(bodies, decided.inside, strict=True)
        while bool(self._returned(*condition, inputs)[0]):
            inputs = self._returned(*iteration, inputs)
        return inputs

    def _iterated(self, body: Body, decided: TypedNode, inputs: list[Any]) -> list[Any]:
        """Run ``for batch in dataset``, whose function takes carried values, an element and captured values."""
        attributes = decided.node.definition.attr
        carried, captured = (len(attributes[name].list.type) for name in ("Tstate", "Targuments"))
        state, others = inputs[1 : 1 + carried], inputs[1 + carried :]
        types = [dtype for _, dtype in body.decisions.graph.arguments][carried:][: -captured or None]
        made: list[list[Any]] = []
        for element in elements_of(inputs[0], types):
            results = self._returned(body, decided.inside[0], [*state, *element, *others])
            state = results[:carried]
            made.append(results[carried:])
        if decided.node.op == "ReduceDataset":
            return state
        return [dataset_of(made) if made else inputs[0]]

    def _returned(self, body: Body, inside: Inside, arguments: Sequence[Any]) -> list[Any]:
        values = self._values(body, arguments)
        types = [_wide(dtype) if self._widened else dtype for dtype in inside.results]
        results = zip(body.decisions.graph.returns, types, strict=True)
        return [self._cast(body, values, value, dtype, RESULT) for value, dtype in results]

    def _cast(self, body: Body, values: Mapping[str, Any], value: str, dtype: int, anew: Sequence[str]) -> Any:
        """Return a value in a type; in float32, computed again if its role is in ``anew``."""
        tensor = values[value]
        if tensor.dtype.as_datatype_enum == dtype:
            return tensor
        maker = body.decisions.computed_anew(value, anew) if dtype == FLOAT32 else None
        if maker is None:
            return tf.cast(tensor, dtype)
        inputs = [self._cast(body, values, one, wanted, anew) for one, wanted in maker.typed_inputs]
        return run_operation(maker.definition, inputs, maker.definition.attr, 1)[0]

    def _widen(self, tensor: Any) -> Any:
        is_low = self._widened and tensor.dtype.as_datatype_enum in LOW
        return tf.cast(tensor, tf.float32) if is_low else tensor

    def _count(self, body: Body, value: str, tensor: Any) -> None:
        if value in body.rounded and not self._widened:
            tensor = tf.cast(tensor, body.rounded[value])
        shape, spread = tuple(tensor.shape), spread_of(tensor.numpy())
        if (body, value) in self.counted:
            spread = self.counted[body, value][1].merged(spread)
        self.counted[body, value] = (shape, spread)


def _stays(node: Node) -> bool:
    """Return whether the types of a node's values are fixed by something outside the graph."""
    return (
        bool(node.called)
        or node.op in _OUTSIDE
        or any(port.dtype == _RESOURCE or port.dtype > 100 for port in node.input_ports)
    )


def _wide(dtype: int) -> int:
    return FLOAT32 if dtype in LOW else dtype


def _in_float32(attribute: Any) -> Any:
    """Return an attribute of a node with float32 in place of 16-bit types."""
    if attribute.type in LOW:
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
