"""Writes the new graph: copies of nodes on other inputs, the casts between them, and what the user's module lacks."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from polyamp.backends.torch import unstable
from polyamp.backends.torch.graphs.graph import native_name
from polyamp.backends.torch.graphs.values import Known, dtypes_of, fake_as, target_of, value_of
from polyamp.backends.torch.operations import WITH_STATISTICS
from polyamp.flow import Decision, Value


class Writing:
    """A new graph while it is being written."""

    def __init__(self, graph: Graph, mode: Any) -> None:
        self.graph, self.mode = graph, mode
        self.records = True
        self.made: list[tuple[Known, torch.dtype]] = []
        self._casts: dict[tuple[Any, ...], Node] = {}

    def run_on_fakes(self, node: Node, fakes: Mapping[Node, Any]) -> Any:
        """Return a node's result on fake tensors, which have no data."""
        args, kwargs = map_arg((node.args, node.kwargs), fakes.__getitem__)
        with unstable.on_fakes(self.mode):
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def copy(self, node: Node, inputs: Mapping[Node, Any], fake: Any) -> Node:
        """Add a copy of a node on other inputs, with its result as a fake tensor."""
        args, kwargs = map_arg((node.args, node.kwargs), inputs.__getitem__)
        new = self.graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        new.meta = {**node.meta, "example_value": fake}
        return new

    def cast(self, known: Known, dtype: torch.dtype | None, *, adds: bool = False) -> Any:
        """Return a value in a dtype: the node itself, or a cast, which is written once for all equal values."""
        if isinstance(known.fake, tuple | list) and dtypes_of(known.fake) != dtypes_of(known.declared):
            return tuple(self.cast(part, dtype) for part in self._parts(known))
        if not isinstance(known.fake, Tensor) or known.fake.dtype == (target := target_of(known, dtype)):
            return known.node
        strides = str(known.fake.stride()) if known.fake.layout == torch.strided else ""
        key = (known.node if known.number is None else known.number, known.fake.dtype, strides, target, self.records)
        if key not in self._casts:
            self.made.append((known, target))
            exceeds = adds and may_exceed(value_of(known))
            source = write_saturated(self.graph, known.node, target) if exceeds else known.node
            new = self.graph.call_method("to", (source, target))
            new.meta = {**known.node.meta, "example_value": fake_as(known, dtype, self.mode)}
            self._casts[key] = new
        return self._casts[key]

    def forget(self, stale: Collection[Any]) -> None:
        """Drop the casts of values that changed; ``stale`` has their numbers."""
        self._casts = {key: made for key, made in self._casts.items() if key[0] not in stale}

    def _parts(self, known: Known) -> Iterator[Known]:
        """Yield the single results of an operation that returns several."""
        for index, (fake, declared) in enumerate(zip(known.fake, known.declared, strict=True)):
            node = self.graph.call_function(operator.getitem, (known.node, index))
            yield Known(node, fake, declared)


def may_exceed(value: Value) -> bool:
    """Return whether a value can be finite, but beyond the compute format."""
    return value.state in ("input", "strong") or bool(value.unfit)


HOLDER = "_polyamp"  # the submodule that holds them


class Attributes(dict[str, Any]):
    """Modules and tensors, by the paths that a graph uses for them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def add(self, held: Any) -> str:
        """Add a module or tensor, and return its path."""
        kind = "body" if isinstance(held, nn.Module) else "constant" if not isinstance(held, nn.Parameter) else "weight"
        path = f"{HOLDER}.{self.name}.{kind}_{len(self)}"
        self[path] = held
        return path

    def as_module(self) -> nn.Module:
        """Return a module with all of these, by the last parts of their paths. Saving it saves only parameters."""
        module = nn.Module()
        for path, held in self.items():
            name = path.rpartition(".")[2]
            if isinstance(held, Tensor) and not isinstance(held, nn.Parameter):
                module.register_buffer(name, held, persistent=False)
            else:
                setattr(module, name, held)
        for part in module.modules():  # constants, also those of bodies, are not saved
            part._non_persistent_buffers_set.update(part._buffers)
        return module


# Operators whose kernels take 16-bit data with float32 parameters, and the device types where they do. On CUDA these
# norms read their parameters in the type of the data.
_MIXED: dict[str, frozenset[str]] = {
    "layer_norm": frozenset({"cpu"}),
    "group_norm": frozenset({"cpu"}),
}
_NORMS = frozenset({*_MIXED, *WITH_STATISTICS, "rms_norm"})
_WITHOUT_KERNEL = {("avg_pool3d", "cpu")}  # in 16 bits
_GATHERING = frozenset({"gather", "index", "index_select", "take", "take_along_dim", "_unsafe_index", "getitem"})


class Manner(NamedTuple):
    """The dtypes in which an operation runs."""

    dtype: torch.dtype  # the dtype that inputs are cast to
    cast: Sequence[Node]  # the inputs that are cast
    rounded: bool = False  # whether its first result, the data, is cast to the compute format


AS_IT_IS = Manner(torch.float32, ())


def manner(node: Node, decision: Decision, floating: Sequence[Node], low: torch.dtype) -> Manner:
    """Return the dtypes in which a node runs, by the decision of the flow rule."""
    operation = decision.operation
    data = floating[:1] if operation in WITH_STATISTICS else floating
    if decision.output.state != "low":
        return Manner(torch.float32, data)
    if decision.format == "float32":
        return Manner(torch.float32, data, rounded=decision.rounds)
    has_kernel = (native_name(node).partition(".")[0], _device_type(node)) not in _WITHOUT_KERNEL
    divides = operation == "div" and len(set(floating)) == 2 and low == torch.float16
    if decision.is_wide or not has_kernel or sums_gradients(node, operation) or divides:
        return Manner(torch.float32, data, rounded=True)  # the derivative of ``a / b`` has ``a / b / b``
    takes_mixed = _device_type(node) in _MIXED.get(operation, ())
    return Manner(low, floating[:1] if takes_mixed else data)


def of_results(operation: str, value: Value, results: Any) -> Any:
    """Return the facts about an operation's results: a norm returns statistics after its data."""
    if operation not in _NORMS or not isinstance(results, tuple | list):
        return value
    return [value, *(Value("strong", operation, role="statistic") for _ in results[1:])]


def sums_gradients(node: Node, operation: str) -> bool:
    """Return whether the gradient of a node adds many elements into one place, which needs float32, as sums do."""
    result = node.meta.get("example_value")
    if operation not in ("gather", "slice", "embedding") or not getattr(result, "requires_grad", False):
        return False
    indices = node.all_input_nodes[1:] if operation != "embedding" else node.all_input_nodes
    examples = [one.meta.get("example_value") for one in indices]
    integral = [one for one in examples if isinstance(one, Tensor) and one.dtype in (torch.int64, torch.int32)]
    name = native_name(node).partition(".")[0]
    return bool(integral) and (operation == "embedding" or name in _GATHERING)


def _device_type(node: Node) -> str:
    example = next((one.meta.get("example_value") for one in node.all_input_nodes), None)
    return example.device.type if isinstance(example, Tensor) else ""


def takes_wide_mask(node: Node) -> bool:
    """Return whether a node is an attention whose kernels accept a float32 mask with 16-bit data, as on the CPU."""
    return native_name(node).startswith("scaled_dot_product_attention") and _device_type(node) == "cpu"


def write_saturated(graph: Graph, value: Node, dtype: torch.dtype) -> Node:
    """Write nodes for a value whose finite numbers stay finite in a dtype."""
    # A row of masks of -1e9, as infinities, would become NaN.
    limit = torch.finfo(dtype).max
    infinite = graph.call_method("isinf", (value,))
    nearest = graph.call_method("clamp", (value, -limit, limit))
    kept = graph.call_function(torch.where, (infinite, value, nearest))
    for one in (infinite, nearest, kept):
        one.meta = dict(value.meta)
    return kept
