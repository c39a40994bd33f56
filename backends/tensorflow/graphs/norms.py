"""Replace batch norms that a graph writes out, and their gradients, by the one kernel for each.

Keras writes a batch norm as `tf.nn.moments` and `tf.nn.batch_normalization`: about fifteen nodes, and thirty more for
its gradient, most of which read and write whole images in float32. ``FusedBatchNormV3`` takes 16-bit images, computes
in float32 and reads each image once; ``FusedBatchNormGradV3`` does the same for the gradient. Other users of the mean
and the variance, such as moving averages, get the kernel's.

The nodes are not listed here: TensorFlow writes an example, and a part of a graph is a norm if it is the same as the
example, except for moves. For example, Keras reshapes the mean that `tf.nn.moments` squeezed: without these moves it is
the ``Mean`` of the example. A norm that differs anywhere stays as it is.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from polyamp.backends.tensorflow.graphs.graph import FLOAT32, Graph, Node, NodeDef, Places, maker_name

Match = Mapping[str, str]
"""The values of a graph that are the same as the example's, by the example's names for them."""

_MOVES = ("Reshape", "Squeeze", "ExpandDims", "Identity", "StopGradient", "Tile", "BroadcastTo")
_COMMUTATIVE = ("AddN", "AddV2", "Mul")
_IMAGES, _ELEMENTS = (2, 3, 5, 7), 30.0  # the shape of the example's images, and the elements of one channel


@functools.cache
def _example() -> Graph:
    """Return a batch norm of a training step, with its gradient, as TensorFlow writes them."""
    with tf.Graph().as_default() as graph:
        shapes = {"x": _IMAGES, "grad": _IMAGES, "scale": _IMAGES[3:], "offset": _IMAGES[3:], "epsilon": ()}
        x, grad, scale, offset, epsilon = (
            tf.compat.v1.placeholder(tf.float32, shape, name) for name, shape in shapes.items()
        )
        mean, variance = tf.nn.moments(x, (0, 1, 2))
        y = tf.nn.batch_normalization(x, mean, variance, offset, scale, epsilon)
        grads = tf.gradients(y, [x, scale, offset], grad)
        names = ("y", "mean", "variance", "x_grad", "scale_grad", "offset_grad")
        for name, tensor in zip(names, (y, mean, variance, *grads), strict=True):
            tf.identity(tensor, name)
    return Graph(graph.as_graph_def().node, {})


def _unmoved(graph: Graph, value: str) -> str:
    while (node := graph.maker.get(value)) is not None and node.op in _MOVES:
        value = node.inputs[0]
    return value


def _of(found: Match, name: str) -> str:
    return found[_unmoved(_example(), name)]


class _Search:
    """The search for the example in one graph."""

    def __init__(self, graph: Graph, places: Places) -> None:
        self._graph, self._places, self._consumers = graph, places, graph.consumers()

    def norms(self) -> Iterator[Match]:
        """Yield the norms that a kernel can replace, each with its gradient if that is complete."""
        found = (self._gradient(node) for node in self._graph.nodes if node.op == "AddN")
        gradients = {(_of(one, "scale"), _of(one, "variance")): one for one in found if one is not None}
        for node in self._graph.nodes:
            norm = self._same("y", node.outputs[0], {}) if node.op == "AddV2" else None
            if norm is not None and self._has_kernel(node, norm):
                gradient = gradients.get((_of(norm, "scale"), _of(norm, "variance")), {})
                is_its = all(gradient.get(name, value) == value for name, value in norm.items())
                yield {**norm, **gradient} if is_its else norm

    def _gradient(self, node: Node) -> Match | None:
        found = self._same("x_grad", node.outputs[0], {})
        if found is None:
            return None
        last = _example().maker[_unmoved(_example(), "scale_grad")]
        users = self._consumers[self._graph.maker[found[last.inputs[0]]].name]
        results = (self._same("scale_grad", one.outputs[0], found) for one in users if one.op == last.op)
        return next(filter(None, results), None)

    def _same(self, wanted: str, value: str, known: Match) -> Match | None:
        """Return ``known`` with matches for a value and its makers; None if the example makes ``wanted`` otherwise."""
        wanted = _unmoved(_example(), wanted)
        one = _example().maker[wanted]
        is_argument = one.op == "Placeholder"
        value = value if is_argument else _unmoved(self._graph, value)
        if is_argument or wanted in known:
            return {**known, wanted: value} if known.get(wanted, value) == value else None
        other = self._graph.maker.get(value)
        if other is None or other.op != one.op or len(other.inputs) != len(one.inputs):
            return None
        known = {**known, wanted: value}
        if one.op == "Const":
            return known if self._is_same_constant(one, other, known) else None
        orders = itertools.permutations(other.inputs) if one.op in _COMMUTATIVE else [other.inputs]
        return next(filter(None, (self._all_same(one.inputs, order, known) for order in orders)), None)

    def _all_same(self, wanted: Sequence[str], values: Sequence[str], known: Match) -> Match | None:
        for pair in zip(wanted, values, strict=True):
            found = self._same(*pair, known)
            if found is None:
                return None
            known = found
        return known

    def _is_same_constant(self, one: Node, other: Node, known: Match) -> bool:
        expected, elements = _content(one), np.prod(self._shape(known["x"])[:3])
        return np.array_equal(np.where(expected == _ELEMENTS, elements, expected), _content(other))

    def _has_kernel(self, result: Node, norm: Match) -> bool:
        """Return whether a norm is of float32 images, and has one scale and offset for each channel."""
        shape = self._shape(norm["x"])
        shapes = {self._shape(_of(norm, name)) for name in ("scale", "offset", "mean", "variance")}
        epsilon = self._graph.maker.get(norm["epsilon"])
        if result.output_ports[0].dtype != FLOAT32 or len(shape) != 4 or epsilon is None or epsilon.op != "Const":
            return False
        # In a renormalization the scale is made from the variance, so it cannot be an input of the variance's kernel.
        before = self._graph.made_from([norm["scale"], norm["offset"]])
        statistics = {_of(norm, "mean"), _of(norm, "variance")}
        return shapes <= {shape[3:], (1, 1, 1, *shape[3:])} and before.isdisjoint(statistics)

    def _shape(self, value: str) -> tuple[int, ...]:
        return self._places.shape(self._graph, value) or ()


def _content(constant: Node) -> Any:
    return tf.make_ndarray(constant.definition.attr["value"].tensor)


def fused(graph: Graph, places: Places, library: Mapping[str, Any]) -> Graph:
    """Return a function's body with kernels for its norms; the same graph if it has none."""
    if not graph.in_function or not any(node.op == "Rsqrt" for node in graph.nodes):
        return graph
    kernels = [_Kernel(graph, places, norm) for norm in _Search(graph, places).norms()]
    if not kernels:
        return graph
    new = {name: node for kernel in kernels for name, node in kernel.nodes.items()}
    moved = {old: value for kernel in kernels for old, value in kernel.moved.items()}
    left = _used({node.name: node.definition for node in graph.nodes} | new, graph, moved)
    # What the other nodes moved counts for the first kernel, so that totals compare with the graph as it was written.
    gone = [node for node in graph.nodes if left.get(node.name) is not node.definition]
    replaced_bytes = dict.fromkeys(new, 0) | {kernels[0].name: sum(_bytes(graph, places, node) for node in gone)}
    return graph.replaced(left.values(), library, moved, replaced_bytes)


def _used(definitions: dict[str, Any], graph: Graph, moved: Mapping[str, str]) -> dict[str, Any]:
    """Return the nodes without those that nothing takes since kernels replaced the norms."""
    uses = Counter(maker_name(moved.get(value, value)) for value in graph.returns)
    for definition in definitions.values():
        uses.update(maker_name(moved.get(text, text)) for text in definition.input)
    used_before = {maker_name(text) for node in graph.nodes for text in node.definition.input}
    parts = {node.op for node in _example().nodes}
    for node in reversed(graph.nodes):
        is_part = node.op in parts and node.name in used_before and definitions[node.name] is node.definition
        if is_part and not uses[node.name]:
            uses.subtract(maker_name(moved.get(text, text)) for text in definitions.pop(node.name).input)
    return definitions


def _bytes(graph: Graph, places: Places, node: Node) -> int:
    ports = [*zip(node.inputs, node.input_ports, strict=True), *zip(node.outputs, node.output_ports, strict=True)]
    return sum(4 * places.elements(graph, value) for value, port in ports if port.dtype == FLOAT32)


_Attr = tf.compat.v1.AttrValue
_FLOAT, _INT32 = _Attr(type=FLOAT32), _Attr(type=tf.int32.as_datatype_enum)


class _Kernel:
    """The kernels of a norm and its gradient, under the names of their results, and the small nodes around them."""

    def __init__(self, graph: Graph, places: Places, norm: Match) -> None:
        self.nodes: dict[str, Any] = {}
        self.moved: dict[str, str] = {}  # the new names of values by their old names
        self._graph, self._places, self._norm = graph, places, norm
        self.name = name = self._maker("y").name
        scale, offset = (self._reshaped(f"{name}/polyamp_{key}", norm[key], [-1]) for key in ("scale", "offset"))
        empty = self._constant(f"{name}/polyamp_empty", np.zeros(0, np.float32))
        epsilon = float(_content(graph.maker[norm["epsilon"]]))
        attributes = {"T": _FLOAT, "U": _FLOAT, "epsilon": _Attr(f=epsilon), "is_training": _Attr(b=True)}
        self._put(name, "FusedBatchNormV3", [norm["x"], scale, offset, empty, empty], attributes)
        self.moved[_of(norm, "y")] = f"{name}:y:0"
        self._replace("mean", f"{name}:batch_mean:0")
        elements = int(np.prod(self._shape("x")[:3]))
        biased = self._constant(f"{name}/polyamp_biased", np.float32(max(elements - 1, 1) / elements))
        self._put(f"{name}/polyamp_variance", "Mul", [f"{name}:batch_variance:0", biased], {"T": _FLOAT})
        self._replace("variance", f"{name}/polyamp_variance:z:0")
        if "grad" in norm:
            last = self._maker("x_grad").name
            reserves = [f"{name}:reserve_space_{number}:0" for number in (1, 2, 3)]
            self._put(last, "FusedBatchNormGradV3", [norm["grad"], norm["x"], scale, *reserves], attributes)
            self.moved[_of(norm, "x_grad")] = f"{last}:x_backprop:0"
            self._replace("scale_grad", f"{last}:scale_backprop:0")
            self._replace("offset_grad", f"{last}:offset_backprop:0")

    def _maker(self, name: str) -> Node:
        return self._graph.maker[_of(self._norm, name)]

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._places.shape(self._graph, _of(self._norm, name)) or ()

    def _replace(self, name: str, value: str) -> None:
        """Replace a value of the example by another, in its shape."""
        reshaped = self._reshaped(f"{self._maker(name).name}/polyamp_reshaped", value, self._shape(name))
        self.moved[_of(self._norm, name)] = reshaped

    def _reshaped(self, name: str, value: str, shape: Sequence[int]) -> str:
        constant = self._constant(f"{name}_shape", np.array(shape, np.int32))
        self._put(name, "Reshape", [value, constant], {"T": _FLOAT, "Tshape": _INT32})
        return f"{name}:output:0"

    def _constant(self, name: str, content: Any) -> str:
        tensor = tf.make_tensor_proto(content)
        self._put(name, "Const", [], {"value": _Attr(tensor=tensor), "dtype": _Attr(type=tensor.dtype)})
        return f"{name}:output:0"

    def _put(self, name: str, op: str, inputs: Sequence[str], attributes: Mapping[str, Any]) -> None:
        device = self._maker("y").definition.device
        self.nodes[name] = NodeDef(name=name, op=op, input=inputs, device=device, attr=attributes)
