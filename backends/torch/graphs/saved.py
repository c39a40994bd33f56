"""The bytes that autograd keeps of a forward pass for the backward pass, found out on tensors without data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils.checkpoint import checkpoint

from polyamp.backends.torch import unstable


def bytes_saved(graph: Graph, attributes: Mapping[str, Any]) -> int | None:
    """Bytes of the tensors that autograd keeps, parameters and arguments included, each memory once.

    Args:
        graph: one whose inputs have fakes.
        attributes: its bodies, by name.

    Returns:
        None where the graph does not run on fakes.
    """
    mode = unstable.fake_mode_of(node.meta.get("example_value") for node in graph.nodes)
    if mode is None:
        return None
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        memory = unstable.storage_of(tensor)
        if memory is not None:
            kept[memory] = unstable.hint(tensor.untyped_storage().nbytes())
            alive.append(tensor)
        return tensor.detach()  # itself, an output would hold the node that holds it

    alive: list[Tensor] = []  # a memory that is freed gives its number to another
    holder = _OnFakes(GraphModule(_root(graph, attributes), graph))
    try:
        with unstable.on_fakes(mode), torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, _same):
            holder.run(*graph.find_nodes(op="placeholder"))
    except (RuntimeError, TypeError, NotImplementedError):  # an operator of the user's without a fake kernel
        return None
    finally:
        alive.clear()  # autograd's graph has the hooks, and they have these: no collector sees that ring
    return sum(kept.values())


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _root(graph: Graph, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """What the graph gets by name; what has a fake is never looked at."""
    names = {str(node.target) for node in graph.find_nodes(op="get_attr")}
    return {name: attributes.get(name, nn.Identity()) for name in names}


class _OnFakes(Interpreter):
    """Runs a graph on the fakes that its inputs have."""

    def run_node(self, n: Node) -> Any:
        """A node's value; an input's fake."""
        if n.op in ("placeholder", "get_attr") and "example_value" in n.meta:
            return n.meta["example_value"]
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """What a function gives; a checkpoint keeps nothing of its body."""
        if unstable.is_operator_of_bodies(target, "tag_activation_checkpoint"):
            return checkpoint(*args, **{**kwargs, "use_reentrant": False})
        return super().call_function(target, args, kwargs)
