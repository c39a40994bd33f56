"""Finds nodes of a captured graph that share memory, and memory that is changed in place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import Graph, Node

from polyamp.backends.torch.graphs.nodes import OPERATORS, changed_in_place
from polyamp.backends.torch.unstable import storage_of


class Aliases:
    """The memory behind the values of a graph."""

    # A value that is changed in place can still be cast if nothing else shares its memory: then the cast is changed
    # instead. Changed memory that has views, or that belongs to the caller or a buffer, is *pinned*: it keeps its
    # declared dtype.

    def __init__(self, graph: Graph) -> None:
        self._changed = {node: changed_in_place(node) for node in graph.nodes}
        self._names: dict[int, list[Node]] = defaultdict(list)
        for node in graph.nodes:
            if (memory := storage_of(node.meta.get("example_value"))) is not None:
                self._names[memory].append(node)
        touched = {memory for nodes in self._changed.values() for node in nodes for memory in _memories(node)}
        opaque = {
            memory
            for node in graph.nodes
            if _is_opaque(node)
            for one in self._changed[node]
            for memory in _memories(one)
        }
        self._touched = touched
        self._pinned = opaque | {memory for memory in touched if not self._is_private(memory)}

    def changed(self, node: Node) -> list[Node]:
        """Return the nodes whose values a node changes."""
        return self._changed[node]

    def is_pinned(self, node: Node) -> bool:
        """Return whether a node makes or changes pinned memory."""
        return any(memory in self._pinned for one in (node, *self._changed[node]) for memory in _memories(one))

    def keeps(self, node: Node) -> bool:
        """Return whether a node changes or views pinned memory that an earlier node made."""
        pinned = self._pinned & {memory for one in (node, *self._changed[node]) for memory in _memories(one)}
        return any(memory in pinned for one in node.all_input_nodes for memory in _memories(one))

    def is_touched(self, node: Node) -> bool:
        """Return whether the memory of a node is changed somewhere in the graph."""
        return any(memory in self._touched for memory in _memories(node))

    def names(self, node: Node) -> set[Node]:
        """Return all nodes that share memory with a node, and the node."""
        return {name for memory in _memories(node) for name in self._names[memory]} | {node}

    def _is_private(self, memory: int) -> bool:
        makers = [node for node in self._names[memory] if not self._changed[node]]
        return len(makers) <= 1 and not any(node.op in ("placeholder", "get_attr") for node in makers)


def _memories(node: Node) -> Iterator[int]:
    leaves: list[Any] = pytree.tree_leaves(node.meta.get("example_value"))
    return (memory for leaf in leaves if isinstance(leaf, Tensor) and (memory := storage_of(leaf)) is not None)


def _is_opaque(node: Node) -> bool:
    """Return whether a node calls a user's operator, whose result need not be the argument that it changed."""
    return isinstance(node.target, OPERATORS[0]) and not str(node.target).startswith("aten.")
