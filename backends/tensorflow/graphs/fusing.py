"""Replace batch norms that a graph writes out by the one kernel that does their work.

A written-out norm has about fifteen nodes and its gradient thirty more, and most of them read and write whole images in
float32. ``FusedBatchNormV3`` takes 16-bit images, computes in float32 and reads each image once;
``FusedBatchNormGradV3`` does the same for the gradient. Other users of the mean and the variance, such as moving
averages, get the kernel's. A norm that does not match in every part stays as it is; see `norms`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from polyamp.backends.tensorflow.graphs.graph import FLOAT32, Graph, Node, NodeDef
from polyamp.backends.tensorflow.graphs.norms import Gradient, Norm, NormFinder
from polyamp.backends.tensorflow.graphs.places import Places


def fused(graph: Graph, places: Places, library: Mapping[str, Any]) -> Graph:
    """Return a function's body with kernels for its norms; the same graph if it has none."""
    if not graph.in_function or not any(node.op == "Rsqrt" for node in graph.nodes):
        return graph
    found = NormFinder(graph, places)
    norms = list(found.norms())
    return _Fusion(graph, places, library).written(norms, found) if norms else graph


class _Fusion:
    """The replacement of some of a graph's nodes by kernels, which get the names of the replaced nodes."""

    def __init__(self, graph: Graph, places: Places, library: Mapping[str, Any]) -> None:
        self._graph, self._places, self._library = graph, places, library
        self._definitions = {node.name: node.definition for node in graph.nodes}
        self._before = {node.name: node for node in graph.nodes}
        self._moved: dict[str, str] = {}  # the new names of values by their old names
        self._replaced_bytes: dict[str, int] = {}

    def written(self, norms: Sequence[Norm], found: NormFinder) -> Graph:
        """Replace norms and their gradients by kernels, and remove the nodes that nothing takes any more."""
        for norm in norms:
            gradient = found.gradient(norm)
            self._put_norm(norm)
            if gradient is not None:
                self._put_gradient(norm, gradient)
        self._remove_unused(norms[0].result.name)
        return self._graph.replaced(list(self._definitions.values()), self._library, self._moved, self._replaced_bytes)

    def _put_norm(self, norm: Norm) -> None:
        name, elements = norm.result.name, int(np.prod(self._shape(norm.x)[:3]))
        vector = self._put_constant(f"{name}/polyamp_vector", np.array([-1], np.int32))
        empty = self._put_constant(f"{name}/polyamp_empty", np.zeros(0, np.float32))
        scale, offset = (
            self._put(f"{name}/polyamp_{key}", "Reshape", [value, vector], T=FLOAT32, Tshape=_INT32)
            for key, value in (("scale", norm.scale), ("offset", norm.offset))
        )
        self._put(name, "FusedBatchNormV3", [norm.x, scale, offset, empty, empty], norm, exponential_avg_factor=1.0)
        self._moved[norm.result.outputs[0]] = f"{name}:y:0"
        biased = self._put_constant(f"{name}/polyamp_biased", np.float32(max(elements - 1, 1) / elements))
        variance = self._put(f"{name}/polyamp_variance", "Mul", [f"{name}:batch_variance:0", biased], T=FLOAT32)
        self._reshape(norm.mean, f"{name}:batch_mean:0")
        self._reshape(norm.variance, variance.replace(":output:0", ":z:0"))

    def _put_gradient(self, norm: Norm, gradient: Gradient) -> None:
        name, forward = gradient.result.name, norm.result.name
        reserves = [f"{forward}:reserve_space_{number}:0" for number in (1, 2, 3)]
        inputs = [gradient.grad, norm.x, f"{forward}/polyamp_scale:output:0", *reserves]
        self._put(name, "FusedBatchNormGradV3", inputs, norm)
        self._moved[gradient.result.outputs[0]] = f"{name}:x_backprop:0"
        self._reshape(gradient.scale, f"{name}:scale_backprop:0")
        self._reshape(gradient.offset, f"{name}:offset_backprop:0")

    def _reshape(self, node: Node, value: str) -> None:
        """Replace a node's output by another value, in the shape of the output."""
        shape = self._put_constant(f"{node.name}/polyamp_shape", np.array(self._shape(node.outputs[0]), np.int32))
        new = self._put(node.name, "Reshape", [value, shape], T=FLOAT32, Tshape=_INT32)
        self._moved[node.outputs[0]] = new

    def _put_constant(self, name: str, content: Any) -> str:
        self._put(name, "Const", [])
        attributes = self._definitions[name].attr
        attributes["value"].tensor.CopyFrom(tf.make_tensor_proto(content))
        attributes["dtype"].type = tf.as_dtype(content.dtype).as_datatype_enum
        return f"{name}:output:0"

    def _put(self, name: str, op: str, inputs: Sequence[str], norm: Norm | None = None, **attributes: Any) -> str:
        device = self._definitions[name].device if name in self._definitions else ""
        new = NodeDef(name=name, op=op, input=inputs, device=device)
        for key, value in attributes.items():
            setattr(new.attr[key], "f" if isinstance(value, float) else "type", value)
        if norm is not None:
            new.attr["T"].type = new.attr["U"].type = FLOAT32
            new.attr["epsilon"].f, new.attr["data_format"].s, new.attr["is_training"].b = norm.epsilon, b"NHWC", True
            new.device = self._definitions[norm.result.name].device
        self._definitions[name], self._replaced_bytes[name] = new, 0
        return f"{name}:output:0"

    def _remove_unused(self, kernel: str) -> None:
        """Remove nodes that nothing takes any more; the bytes that they moved are counted for a kernel of the graph."""
        for node in self._graph.nodes:
            if node.name in self._replaced_bytes:
                self._count(node, kernel)
        uses = Counter(_maker_of(self._moved.get(value, value)) for value in self._graph.returns)
        for one in self._definitions.values():
            uses.update(_maker_of(self._moved.get(text, text)) for text in one.input)
        unused = [name for name in self._definitions if not uses[name] and self._is_pure(name)]
        while unused:
            name = unused.pop()
            self._count(self._before[name], kernel)
            for text in self._definitions.pop(name).input:
                maker = _maker_of(self._moved.get(text, text))
                uses[maker] -= 1
                if not uses[maker] and self._is_pure(maker):
                    unused.append(maker)

    def _is_pure(self, name: str) -> bool:
        node = self._before.get(name)
        if node is None or name in self._replaced_bytes or name not in self._definitions:
            return False
        return node.op in _PURE and name in self._used_before

    @functools.cached_property
    def _used_before(self) -> set[str]:
        return {_maker_of(text) for node in self._graph.nodes for text in node.definition.input}

    def _count(self, node: Node, kernel: str) -> None:
        """Count the bytes that a node moved for a kernel."""
        ports = [*zip(node.inputs, node.input_ports, strict=True), *zip(node.outputs, node.output_ports, strict=True)]
        moved = sum(4 * self._places.elements(self._graph, value) for value, port in ports if port.dtype == FLOAT32)
        self._replaced_bytes[kernel] += moved

    def _shape(self, value: str) -> tuple[int, ...]:
        return self._places.shape(self._graph, value) or ()


def _maker_of(reference: str) -> str:
    return reference.removeprefix("^").partition(":")[0]


_INT32: int = tf.int32.as_datatype_enum
_PURE = frozenset(
    {"Add", "AddN", "AddV2", "BroadcastTo", "Const", "Identity", "Mean", "Mul", "Neg", "RealDiv", "Reshape", "Rsqrt"}
    | {"RsqrtGrad", "SquaredDifference", "Squeeze", "StopGradient", "Sub", "Sum", "Tile"}
)
