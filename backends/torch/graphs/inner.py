"""How kernels carry out what is float32 inside and 16 bits outside: the class ``inner``, masks, gathers' gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from polyamp.backends.torch.graphs.nodes import native_name
from polyamp.flow import Flow, Value
from polyamp.rules import Decision, is_wide

# Operators whose kernels take 16-bit data beside float32 parameters, with the device types where they do so; layer and
# group norm on CUDA read their parameters in the type of the data.
_MIXED: dict[str, frozenset[str]] = {
    "layer_norm": frozenset({"cpu"}),
    "group_norm": frozenset({"cpu"}),
}
_WITH_STATISTICS = frozenset({"batch_norm", "instance_norm"})  # in float32 buffers, which a cast would copy
_NORMS = frozenset({*_MIXED, *_WITH_STATISTICS, "rms_norm"})
_WITHOUT_KERNEL = {("avg_pool3d", "cpu")}  # in 16 bits
_GATHERING = frozenset({"gather", "index", "index_select", "take", "take_along_dim", "_unsafe_index", "getitem"})


class Manner(NamedTuple):
    """How an operation runs.

    Attributes:
        dtype: what inputs are cast to.
        cast: which of them.
        rounded: whether the first of its results, its data, is cast to the compute format.
    """

    dtype: torch.dtype
    cast: Sequence[Node]
    rounded: bool = False


AS_IT_IS = Manner(torch.float32, ())


def manner(
    node: Node, operation: str, decision: Decision, outcome: Flow, floating: Sequence[Node], low: torch.dtype
) -> Manner:
    """Return how a node runs that the flow rule has decided.

    Args:
        node: of the captured graph.
        operation: its canonical name.
        decision: its class.
        outcome: what the rule said.
        floating: its floating inputs.
        low: the dtype of the compute format.
    """
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
    """What is known of what an operation gives: beside a norm's data, its statistics."""
    if operation not in _NORMS or not isinstance(results, tuple | list):
        return value
    return [value, *(Value("strong", operation, role="statistic") for _ in results[1:])]


def _is_wide(node: Node, operation: str, decision: Decision) -> bool:
    place = (native_name(node).partition(".")[0], _device_type(node))
    return is_wide(operation, decision) or place in _WITHOUT_KERNEL


def sums_gradients(node: Node, operation: str) -> bool:
    """Whether the gradient of a gather adds up what went to many places: in float32, as sums are."""
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
    """Whether a node is an attention whose kernels add a float32 mask to 16-bit scores; CUDA's refuse it."""
    return native_name(node).startswith("scaled_dot_product_attention") and _device_type(node) == "cpu"


def saturated(graph: Graph, value: Node, dtype: torch.dtype) -> Node:
    """Write what keeps finite numbers finite in a dtype: masks of -1e9 are no infinities, which would be NaN in a row.

    Returns:
        A node in the type of ``value``.
    """
    limit = torch.finfo(dtype).max
    infinite = graph.call_method("isinf", (value,))
    nearest = graph.call_method("clamp", (value, -limit, limit))
    kept = graph.call_function(torch.where, (infinite, value, nearest))
    for one in (infinite, nearest, kept):
        one.meta = dict(value.meta)
    return kept
