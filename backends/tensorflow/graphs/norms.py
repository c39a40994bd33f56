"""Replace batch norms, and their gradients, that a graph writes out by the one kernel that does their work.

Keras writes a batch norm as `tf.nn.moments` and `tf.nn.batch_normalization`. In the graph this is about fifteen nodes::

    mean, variance = Mean(x), Mean(SquaredDifference(x, mean))
    factor = Rsqrt(variance + epsilon) * scale
    result = x * factor + (offset - mean * factor)

The search starts at the last node of a norm and goes backwards. All parts must match.

A written-out norm has about fifteen nodes and its gradient thirty more, and most of them read and write whole images in
float32. ``FusedBatchNormV3`` takes 16-bit images, computes in float32 and reads each image once;
``FusedBatchNormGradV3`` does the same for the gradient. Other users of the mean and the variance, such as moving
averages, get the kernel's. A norm that does not match in every part stays as it is.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from polyamp.backends.tensorflow.graphs.graph import FLOAT32, Graph, Node, NodeDef, Places

_IMAGE_AXES = (0, 1, 2)
_RESHAPES = ("Reshape", "Squeeze", "ExpandDims", "Identity", "StopGradient")
_SUMS = ("AddN", "AddV2", "Add")


class Norm(NamedTuple):
    """A written-out batch norm of a training step: ``(x - mean) / sqrt(variance + epsilon) * scale + offset``."""

    result: Node  # the node that computes the result
    x: str  # the images, a value
    mean: Node  # the node that computes the mean, of the shape ``[1, 1, 1, channels]``
    variance: Node  # the node that computes the variance, of the same shape
    scale: str  # a value
    offset: str  # a value
    root: str  # the value ``1 / sqrt(variance + epsilon)``
    factor: str  # the value ``root * scale``
    epsilon: float  # the number


class Gradient(NamedTuple):
    """The gradient of a `Norm`."""

    result: Node  # the node that computes the gradient of the images
    grad: str  # the gradient of the norm's result, a value
    scale: Node  # the node that computes the gradient of the scale
    offset: Node  # the node that computes the gradient of the offset


class NormFinder:
    """The search for batch norms and their gradients in one graph."""

    def __init__(self, graph: Graph, places: Places) -> None:
        self._graph, self._places = graph, places
        self._users: dict[str, list[Node]] = {}
        for node in graph.nodes:
            for value in dict.fromkeys(node.inputs):
                self._users.setdefault(value, []).append(node)

    def norms(self) -> Iterator[Norm]:
        """Yield the norms of images in a training step."""
        for node in self._graph.nodes:
            if node.op in ("AddV2", "Add") and node.output_ports[0].dtype == FLOAT32 and len(self._shape(node)) == 4:
                for scaled, shift in (node.inputs, node.inputs[::-1]):
                    if (norm := self._norm(node, scaled, shift)) is not None:
                        yield norm
                        break

    def _norm(self, result: Node, scaled: str, shift: str) -> Norm | None:
        sub = self._made(shift, "Sub")
        moved = self._made(sub.inputs[1], "Mul") if sub else None
        product = self._made(scaled, "Mul")
        if sub is None or moved is None or product is None:
            return None
        for x, factor in (product.inputs, product.inputs[::-1]):
            mean = self._factor_of(moved, factor)
            found = self._statistics(x, mean, factor) if mean else None
            if found is not None and self._is_of_channels(x, sub.inputs[0], *found[:2], found[2]):
                return Norm(result, x, *found[:2], found[2], sub.inputs[0], found[3], factor, found[4])
        return None

    def _statistics(self, x: str, mean: str, factor: str) -> tuple[Node, Node, str, str, float] | None:
        """Find the nodes of mean and variance, the scale, the root and its epsilon."""
        product = self._made(factor, "Mul")
        for root, scale in (product.inputs, product.inputs[::-1]) if product else ():
            rsqrt = self._made(root, "Rsqrt")
            added = self._made(rsqrt.inputs[0], "AddV2") if rsqrt else None
            epsilon = self._number(added.inputs[1]) if added else None
            variance = self._reduced(added.inputs[0]) if added else None
            if added is None or variance is None or epsilon is None:
                continue
            square = self._made(variance.inputs[0], "SquaredDifference")
            average = self._reduced(mean)
            if square is None or average is None or average.inputs[0] != x or square.inputs[0] != x:
                continue
            if self._stripped(square.inputs[1]) == average.outputs[0]:
                return average, variance, scale, root, epsilon
        return None

    def _is_of_channels(self, x: str, offset: str, mean: Node, variance: Node, scale: str) -> bool:
        """Return whether the parts of a norm have one element for each channel of the images ``x``, and known sizes."""
        shape = self._shape_of(x)
        shapes = [self._shape_of(value) for value in (offset, scale, mean.outputs[0], variance.outputs[0])]
        return len(shape) == 4 and all(one[-1:] == shape[-1:] and np.prod(one) == shape[-1] for one in shapes)

    def gradient(self, norm: Norm) -> Gradient | None:
        """Return the gradient of a norm; None if it is not complete."""
        shape = self._shape_of(norm.x)
        for product in self._users.get(norm.factor, ()):
            if product.op == "Mul":
                grad = self._factor_of(product, norm.factor)
                if grad is not None and self._shape_of(grad) == shape and grad != norm.x:
                    return self._gradient(norm, product, grad)
        return None

    def _gradient(self, norm: Norm, direct: Node, grad: str) -> Gradient | None:
        sums = [node for node in self._users.get(grad, ()) if self._sums_images(node)]
        weighted = [
            total
            for node in self._users.get(grad, ())
            if node.op == "Mul" and self._factor_of(node, norm.x) == grad
            for total in self._users.get(node.outputs[0], ())
            if self._sums_images(total)
        ]
        results = [node for node in self._users.get(direct.outputs[0], ()) if node.op == "AddN"]
        if len(weighted) != 1 or len(results) != 1 or len(results[0].inputs) != 3:
            return None
        others = [value for value in results[0].inputs if value != direct.outputs[0]]
        for total, (by_mean, by_variance) in itertools.product(sums, (others, others[::-1])):
            factor = self._of_variance(norm, by_variance)
            is_of_mean = self._is_of_mean(norm, by_mean, total)
            if factor is None or not is_of_mean or not self._is_of_factor(norm, factor, total, weighted[0]):
                continue
            scales = [one for one in self._users[factor] if self._factor_of(one, norm.root) == factor]
            if len(scales) == 1:
                return Gradient(results[0], grad, scales[0], total)
        return None

    def _is_of_mean(self, norm: Norm, value: str, total: Node) -> bool:
        """Return whether a value is ``-sum(grad) * factor / elements``, broadcast to the images."""
        product = self._made(self._broadcast(norm, value), "Mul")
        negated = self._made(self._factor_of(product, norm.factor), "Neg") if product else None
        return negated is not None and self._stripped(negated.inputs[0]) == total.outputs[0]

    def _of_variance(self, norm: Norm, value: str) -> str | None:
        """Return the gradient of the factor if a value is ``2 * variance's gradient * (x - mean)``."""
        product = self._made(value, "Mul")
        for spread, centred in (product.inputs, product.inputs[::-1]) if product else ():
            sub, twice = self._made(centred, "Sub"), self._made(spread, "Mul")
            if sub is None or twice is None or sub.inputs[0] != norm.x:
                continue
            if self._stripped(sub.inputs[1]) != norm.mean.outputs[0] or self._number(twice.inputs[0]) != 2.0:
                continue
            root = self._made(self._broadcast(norm, twice.inputs[1]), "RsqrtGrad")
            scaled = self._made(root.inputs[1], "Mul") if root and root.inputs[0] == norm.root else None
            return self._factor_of(scaled, norm.scale) if scaled else None
        return None

    def _is_of_factor(self, norm: Norm, factor: str, total: Node, weighted: Node) -> bool:
        """Return whether a value is ``sum(x * grad) - sum(grad) * mean``."""
        summed = self._graph.maker.get(factor)
        if summed is None or summed.op not in _SUMS or len(summed.inputs) != 2:
            return False
        for one, other in (summed.inputs, summed.inputs[::-1]):
            product = self._made(self._stripped(other), "Mul")
            if self._stripped(one) != weighted.outputs[0] or product is None:
                continue
            for negated, mean in (product.inputs, product.inputs[::-1]):
                neg = self._made(negated, "Neg")
                if neg is not None and self._stripped(mean) == norm.mean.outputs[0]:
                    return self._stripped(neg.inputs[0]) == total.outputs[0]
        return False

    def _broadcast(self, norm: Norm, value: str) -> str:
        """Return the value that a mean's gradient divides by its number of elements and broadcasts; else empty."""
        div = self._made(value, "RealDiv")
        spread = self._graph.maker.get(div.inputs[0]) if div else None
        shape = self._shape_of(norm.x)
        is_mean = div is not None and self._number(div.inputs[1]) == float(np.prod(shape[:3]))
        if not is_mean or spread is None or spread.op not in ("Tile", "BroadcastTo"):
            return ""
        return self._stripped(spread.inputs[0])

    def _sums_images(self, node: Node) -> bool:
        return node.op == "Sum" and self._axes(node) == _IMAGE_AXES

    def _reduced(self, value: str) -> Node | None:
        """Return the node that computes a value as a mean over positions and images; reshapes after it are ignored."""
        node = self._made(self._stripped(value), "Mean")
        return node if node is not None and self._axes(node) == _IMAGE_AXES else None

    def _axes(self, node: Node) -> tuple[int, ...] | None:
        made = self._made(node.inputs[1], "Const")
        return tuple(np.ravel(_content(made)).tolist()) if made is not None else None

    def _stripped(self, value: str) -> str:
        node = self._graph.maker.get(value)
        while node is not None and node.op in _RESHAPES:
            value = node.inputs[0]
            node = self._graph.maker.get(value)
        return value

    def _made(self, value: str | None, op: str) -> Node | None:
        node = self._graph.maker.get(value) if value else None
        return node if node is not None and node.op == op else None

    def _factor_of(self, product: Node | None, other: str) -> str | None:
        """Return the factor of a product that is not ``other``."""
        if product is None or product.op != "Mul" or other not in product.inputs:
            return None
        return product.inputs[1 - product.inputs.index(other)]

    def _number(self, value: str) -> float | None:
        made = self._made(value, "Const")
        content = _content(made) if made is not None else None
        return float(content) if content is not None and content.ndim == 0 else None

    def _shape(self, node: Node) -> tuple[int, ...]:
        return self._shape_of(node.outputs[0])

    def _shape_of(self, value: str) -> tuple[int, ...]:
        return self._places.shape(self._graph, value) or ()


def _content(constant: Node) -> Any:
    return tf.make_ndarray(constant.definition.attr["value"].tensor)


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
