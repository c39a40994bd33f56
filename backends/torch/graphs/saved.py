"""Counts the bytes that autograd keeps of a forward pass for the backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils.checkpoint import checkpoint

from polyamp.backends.torch import unstable


class SavedBytes:
    """The bytes of the tensors that autograd keeps, each memory once."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}  # by memory
        self._alive: list[Tensor] = []  # freed memory would pass its number on to another tensor

    @property
    def total(self) -> int:
        """All bytes so far."""
        return sum(self._sizes.values())

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what autograd keeps while this context is active."""
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept):
                yield
        finally:
            self._alive.clear()  # autograd's graph has the hooks, and they have these: no collector sees that cycle

    def _keep(self, tensor: Tensor) -> Tensor:
        memory = unstable.storage_of(tensor)
        if memory is not None:
            self._sizes[memory] = unstable.hint(tensor.untyped_storage().nbytes())
            self._alive.append(tensor)
        return tensor.detach()  # an output itself would hold the node that holds it


def bytes_saved(graph: Graph, attributes: Mapping[str, Any]) -> int | None:
    """Return the bytes that autograd keeps of a graph, including parameters and arguments; it runs on fakes."""
    mode = unstable.fake_mode_of(node.meta.get("example_value") for node in graph.nodes)
    if mode is None:
        return None
    saved, interpreter = SavedBytes(), _OnFakes(GraphModule(_root(graph, attributes), graph))
    try:
        with unstable.on_fakes(mode), torch.enable_grad(), saved.counted():
            interpreter.run(*graph.find_nodes(op="placeholder"))
    except (RuntimeError, TypeError, NotImplementedError):  # one of the user's operators has no fake kernel
        return None
    return saved.total


def _root(graph: Graph, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects that the graph refers to by name; a placeholder for parts with a fake, which are not read."""
    names = {str(node.target) for node in graph.find_nodes(op="get_attr")}
    return {name: attributes.get(name, nn.Identity()) for name in names}


class _OnFakes(Interpreter):
    """Runs a graph on the fakes of its inputs."""

    def run_node(self, n: Node) -> Any:
        """Return a node's value; for an input its fake."""
        if n.op in ("placeholder", "get_attr") and "example_value" in n.meta:
            return n.meta["example_value"]
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a function; call Dynamo's operator for checkpoints as a checkpoint, which keeps nothing of its body."""
        if unstable.is_operator_of_bodies(target, "tag_activation_checkpoint"):
            return checkpoint(*args, **{**kwargs, "use_reentrant": False})
        return super().call_function(target, args, kwargs)
