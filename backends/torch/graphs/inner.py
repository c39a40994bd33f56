"""How kernels run what is float32 inside and 16 bits outside: class ``inner``, masks, gradients of gathers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from polyamp.backends.torch.graphs.nodes import native_name
from polyamp.flow import Flow, Value
from polyamp.rules import Decision, is_wide

# Operators whose kernels take 16-bit data with float32 parameters, and the device types where they do. On CUDA these
# norms read their parameters in the type of the data.
_MIXED: dict[str, frozenset[str]] = {
    "layer_norm": frozenset({"cpu"}),
    "group_norm": frozenset({"cpu"}),
}
_WITH_STATISTICS = frozenset({"batch_norm", "instance_norm"})  # in float32 buffers, which a cast would copy
_NORMS = frozenset({*_MIXED, *_WITH_STATISTICS, "rms_norm"})
_WITHOUT_KERNEL = {("avg_pool3d", "cpu")}  # in 16 bits
_GATHERING = frozenset({"gather", "index", "index_select", "take", "take_along_dim", "_unsafe_index", "getitem"})


class Manner(NamedTuple):
    """The dtypes in which an operation runs."""

    dtype: torch.dtype  # the dtype that inputs are cast to
    cast: Sequence[Node]  # the inputs that are cast
    rounded: bool = False  # whether its first result, the data, is cast to the compute format


AS_IT_IS = Manner(torch.float32, ())


def manner(
    node: Node, operation: str, decision: Decision, outcome: Flow, floating: Sequence[Node], low: torch.dtype
) -> Manner:
    """Return how a node runs after the decision of the flow rule."""
    data = floating[:1] if operation in _WITH_STATISTICS else floating
    if outcome.output.state != "low":
        return Manner(torch.float32, data)
    if outcome.format == "float32":
        return Manner(torch.float32, data, rounded=outcome.rounds)
    if _is_wide(node, operation, decision) or sums_gradients(node, operation):
        return Manner(torch.float32, data, rounded=True)
    takes_mixed = _device_type(node) in _MIXED.get(operation, ())
    return Manner(low, floating[:1] if takes_mixed else data)


def of_results(operation: str, value: Value, results: Any) -> Any:
    """Return the facts about an operation's results: a norm returns statistics after its data."""
    if operation not in _NORMS or not isinstance(results, tuple | list):
        return value
    return [value, *(Value("strong", operation, role="statistic") for _ in results[1:])]


def _is_wide(node: Node, operation: str, decision: Decision) -> bool:
    place = (native_name(node).partition(".")[0], _device_type(node))
    return is_wide(operation, decision) or place in _WITHOUT_KERNEL


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
    """Return whether a node is an attention whose kernels accept a float32 mask with 16-bit data; CUDA's refuse it."""
    return native_name(node).startswith("scaled_dot_product_attention") and _device_type(node) == "cpu"


def saturated(graph: Graph, value: Node, dtype: torch.dtype) -> Node:
    """Write nodes that keep finite numbers finite in a dtype: a row of masks of -1e9, as infinities, would become NaN.

    Returns:
        A node with the dtype of ``value``.
    """
    limit = torch.finfo(dtype).max
    infinite = graph.call_method("isinf", (value,))
    nearest = graph.call_method("clamp", (value, -limit, limit))
    kept = graph.call_function(torch.where, (infinite, value, nearest))
    for one in (infinite, nearest, kept):
        one.meta = dict(value.meta)
    return kept
