"""Reads a captured graph: what its nodes call, where the user wrote them, and which memory they share and change."""

from __future__ import annotations

import inspect
import operator
import re
from collections import defaultdict
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import Graph, Node

from polyamp.backends.torch import unstable
from polyamp.backends.torch.operations import FUNCTIONS, canonical
from polyamp.backends.torch.unstable import storage_of
from polyamp.backends.torch.user_code import line_in

OPERATORS: tuple[type, type] = (type(torch.ops.aten.mm.default), type(torch.ops.aten.mm))  # an overload, a packet

_ATTRIBUTES = {"T": "transpose", "mT": "transpose", "H": "transpose", "mH": "transpose", "data": "detach"}
_CHANGING_OPERATORS = {
    operator.setitem,
    *(getattr(operator, name) for name in FUNCTIONS if name[0] == "i" and hasattr(operator, f"__{name}__")),
}


def native_name(node: Node) -> str:
    """Return the native name of what a node calls, such as ``linear``, ``softmax``, ``add`` or ``mylib.fused.default``.

    >>> graph = torch.fx.symbolic_trace(lambda x: torch.relu(x).sum() + 1).graph
    >>> [native_name(node) for node in graph.nodes if node.op.startswith("call")]
    ['relu', 'sum', 'add']
    """
    if node.op == "call_method":
        return str(node.target)
    if node.target is getattr:
        return _ATTRIBUTES.get(str(node.args[1]), str(node.args[1]))
    if isinstance(node.target, OPERATORS):
        return str(node.target).removeprefix("aten.")
    return str(getattr(node.target, "__name__", node.target))


def operation_of(node: Node) -> str | None:
    """Return the canonical operation of a node; None if the table does not have it, or it is not PyTorch's."""
    name = native_name(node)
    if not _is_torchs(node):
        return None
    plain = name.partition(".")[0]
    operation = "cast" if plain == "as_tensor" and node.all_input_nodes else FUNCTIONS.get(plain) or canonical(plain)
    return "identity" if operation == "cast" and _only_moves(node) else operation


def _only_moves(node: Node) -> bool:
    """Return whether a conversion names a device or layout, but not a dtype."""
    if node.target in ("cpu", "cuda"):
        return True
    others = [*node.args[1:], *node.kwargs.values()]
    return native_name(node) in ("to", "as_tensor") and not any(isinstance(one, torch.dtype | Node) for one in others)


def _is_torchs(node: Node) -> bool:
    """Return whether a node calls a function of PyTorch or Python."""
    target = node.target
    if node.op == "call_method":
        return True
    if isinstance(target, OPERATORS):
        return str(target).startswith("aten.")
    home = getattr(target, "__module__", None) or "torch"  # methods of torch's C types have none
    return home.partition(".")[0] in ("torch", "_operator", "builtins", "math")


def operands_of(node: Node) -> list[Node]:
    """Return the nodes among a node's operands, in operand order; one that is used twice comes twice."""
    named = [node.kwargs[name] for name in ("input", "self") if name in node.kwargs]
    others = [value for name, value in node.kwargs.items() if name not in ("input", "self", "out")]
    found = [one for one in pytree.tree_leaves([*node.args, *named, *others]) if isinstance(one, Node)]
    if native_name(node).partition(".")[0] == "rsub":
        found[:2] = found[1::-1]
    return found


def addend_of(node: Node) -> Node | None:
    """Return the operand that a product adds: the mask of an attention, or the first operand of ``addmm``; else None.

    >>> graph = torch.fx.symbolic_trace(lambda bias, x, y: torch.addmm(bias, x, y)).graph
    >>> [addend_of(node) for node in graph.nodes if node.op.startswith("call")]
    [bias]
    """
    name = native_name(node).partition(".")[0]
    if name == "scaled_dot_product_attention":
        found = node.kwargs.get("attn_mask", node.args[3] if len(node.args) > 3 else None)
    elif name in _ADDING:
        found = node.kwargs.get("input", node.args[0] if node.args else None)
    else:
        found = None
    return found if isinstance(found, Node) else None


_ADDING = frozenset({"addmm", "baddbmm", "addbmm", "addmv", "addr"})


def is_composite(node: Node) -> bool:
    """Return whether a node calls one of torch's Python functions that consists of several operations."""
    return (
        node.op == "call_function"
        and isinstance(node.target, FunctionType)
        and _is_torchs(node)
        and operation_of(node) is None
        and isinstance(node.meta.get("example_value"), Tensor | tuple | list)
    )


def changed_in_place(node: Node) -> list[Node]:
    """Return the nodes whose values a node changes, except statistics such as those of ``batch_norm``."""
    if not node.op.startswith("call"):
        return []
    if isinstance(node.target, OPERATORS[0]):
        places = unstable.written_arguments(node.target)
        written = [node.args[index] if index < len(node.args) else node.kwargs.get(name) for index, name in places]
        return [one for one in written if isinstance(one, Node)]
    given = node.kwargs.get("out")
    if given is None and (_changes_first(node) or _asked_in_place(node)):
        given = node.args[0] if node.args else node.kwargs.get("input")
    return [given] if isinstance(given, Node) else []


def _changes_first(node: Node) -> bool:
    """Return whether a node changes its first argument according to its name: ``add_``, ``operator.iadd``."""
    name = native_name(node)
    if node.target in _CHANGING_OPERATORS:
        return True
    return _is_torchs(node) and bool(re.search(r"[^_]_$", name)) and name not in ("requires_grad_", *FUNCTIONS)


def _asked_in_place(node: Node) -> bool:
    """Return whether a call has ``inplace=True``, as ``torch.nn.functional.relu`` accepts."""
    if not isinstance(node.target, FunctionType):
        return bool(node.kwargs.get("inplace"))
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    except TypeError:
        return False
    return bool(bound.arguments.get("inplace"))


def path_of(node: Node) -> str:
    """Return the path of the module that a node is in, as in ``named_modules``: ``decoder.layers.3.norm``."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    return _ROOT.sub("", path)


_ROOT = re.compile(r"^(.*cell_contents|[LG]\['[^']*'\])\.?")  # the captured function's name for the module


def line_of(node: Node) -> str:
    """Return the user's line that a node comes from, as ``model.py:12 (forward)``; empty if it is not known."""
    return line_in(node.meta.get("stack_trace") or "")


def line_near(node: Node) -> str:
    """Return the line of a node, or of the first node after it that has one."""
    while not (line := line_of(node)) and node.op != "output":
        node = node.next
    return line


class Aliases:
    """The memory behind the values of a graph."""

    # A value that is changed in place can still be cast if nothing else shares its memory: then the cast is changed
    # instead. Changed memory that has views, or that belongs to the caller or a buffer, is *pinned*: it keeps its
    # declared dtype.

    def __init__(self, graph: Graph) -> None:
        self.changed = {node: changed_in_place(node) for node in graph.nodes}  # the nodes whose values a node changes
        self._names: dict[int, list[Node]] = defaultdict(list)
        for node in graph.nodes:
            if (memory := storage_of(node.meta.get("example_value"))) is not None:
                self._names[memory].append(node)
        self._touched = {memory for nodes in self.changed.values() for node in nodes for memory in _memories(node)}
        # A user's operator need not return the argument that it changed.
        opaque = {
            memory
            for node in graph.nodes
            if isinstance(node.target, OPERATORS[0]) and not str(node.target).startswith("aten.")
            for one in self.changed[node]
            for memory in _memories(one)
        }
        self._pinned = opaque | {memory for memory in self._touched if not self._is_private(memory)}

    def is_pinned(self, node: Node) -> bool:
        """Return whether a node makes or changes pinned memory."""
        return any(memory in self._pinned for one in (node, *self.changed[node]) for memory in _memories(one))

    def keeps(self, node: Node) -> bool:
        """Return whether a node changes or views pinned memory that an earlier node made."""
        pinned = self._pinned & {memory for one in (node, *self.changed[node]) for memory in _memories(one)}
        return any(memory in pinned for one in node.all_input_nodes for memory in _memories(one))

    def is_touched(self, node: Node) -> bool:
        """Return whether the memory of a node is changed somewhere in the graph."""
        return any(memory in self._touched for memory in _memories(node))

    def names(self, node: Node) -> set[Node]:
        """Return all nodes that share memory with a node, and the node."""
        return {name for memory in _memories(node) for name in self._names[memory]} | {node}

    def _is_private(self, memory: int) -> bool:
        makers = [node for node in self._names[memory] if not self.changed[node]]
        return len(makers) <= 1 and not any(node.op in ("placeholder", "get_attr") for node in makers)


def _memories(node: Node) -> Iterator[int]:
    leaves: list[Any] = pytree.tree_leaves(node.meta.get("example_value"))
    return (memory for leaf in leaves if isinstance(leaf, Tensor) and (memory := storage_of(leaf)) is not None)
