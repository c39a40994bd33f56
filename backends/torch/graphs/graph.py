"""Reads a captured graph: what its nodes call, where the user wrote them, and which memory they share and change."""

from __future__ import annotations

import inspect
import math
import operator
import re
from collections import defaultdict
from collections.abc import Iterator
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import Graph, Node

from polyamp.backends.torch import unstable
from polyamp.backends.torch.operations import FUNCTIONS, canonical
from polyamp.backends.torch.unstable import storage_of
from polyamp.backends.torch.user_code import line_in
from polyamp.numbering import terms_of_einsum

OPERATORS: tuple[type, type] = (type(torch.ops.aten.mm.default), type(torch.ops.aten.mm))  # an overload, a packet

_ATTRIBUTES = {"T": "transpose", "mT": "transpose", "H": "transpose", "mH": "transpose", "data": "detach"}
# The methods of tensors behind Python's statements that change them: ``x[0] = 1`` and ``x += y``, but not ``x @= y``.
_CHANGING = {
    "__setitem__",
    *(f"__i{name}" for name in (one[2:] for one in dir(Tensor)) if hasattr(Tensor, f"__i{name}")),
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
    """Return the canonical operation of a node; None if the table lacks it, or the call is not of PyTorch."""
    name = native_name(node)
    if not _is_torchs(node):
        return None
    plain = name.partition(".")[0]
    known = FUNCTIONS.get(plain) or canonical(plain) or canonical(plain.strip("_"))  # as in ``x.__matmul__(y)``
    operation = "cast" if plain == "as_tensor" and node.all_input_nodes else known
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


def plain_target(node: Node) -> Any:
    """Return what a node calls; for ``x @= y`` it is ``x @ y``, since tensors have no ``__imatmul__``."""
    # As a statement in code that `torch.fx` generates, it would assign the result to the name of ``x``.
    first = node.args[0].meta.get("example_value") if node.args and isinstance(node.args[0], Node) else None
    plain = getattr(operator, f"__{native_name(node)[1:]}__", None)
    is_statement = getattr(operator, native_name(node), None) is node.target and plain is not None
    return plain if is_statement and not hasattr(first, f"__{native_name(node)}__") else node.target


class Product(NamedTuple):
    """A product of two tensors."""

    operands: list[Node]
    terms: int  # how many terms each element adds up; at least 2 if that is not known
    is_aligned: bool  # whether each element of one operand meets one of the other, as in dot products of rows


def product_of(node: Node) -> Product | None:
    """Return the facts about a product of two tensors; None for any other node."""
    name, given = native_name(node).partition(".")[0], node.args
    operands = operands_of(node)[name in _ADDING :][:2]
    shapes = [tuple(one.meta["example_value"].shape) for one in operands]
    if name == "einsum":
        if not isinstance(given[0], str) or len(shapes) != given[0].count(",") + 1:
            return None
        terms, (first, _, second) = terms_of_einsum(given[0], shapes), given[0].partition("->")[0].partition(",")
        in_order = first.strip() == second.strip()
    elif name in ("outer", "ger", "addr"):
        terms, in_order = 1, False
    elif name == "tensordot":
        axes: Any = node.kwargs.get("dims", given[2] if len(given) > 2 else 2)
        axes = range(-axes, 0) if isinstance(axes, int) else axes[0]
        terms, in_order = math.prod(shapes[0][axis] for axis in axes), False
    elif name in _OF_ROWS and shapes[0]:
        axis: Any = node.kwargs.get("dim", -1) if name == "linalg_vecdot" else -1
        terms, in_order = shapes[0][axis], True
    else:
        return None
    if len(operands) < 2:
        return Product(operands, terms, is_aligned=False)
    result = node.meta["example_value"]
    sizes = {str(one.meta["example_value"].numel()) for one in operands} | {str(result.numel() * terms)}
    return Product(operands, terms if isinstance(terms, int) else 2, is_aligned=in_order and len(sizes) == 1)


# Products whose first operand has the contracted dimension last.
_OF_ROWS = frozenset(
    {"addmm", "addmv", "baddbmm", "bmm", "inner", "linalg_matmul", "linalg_vecdot", "linear", "matmul", "mm", "mv"}
)


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
    """Return the nodes whose values a node changes, except statistics such as those of ``batch_norm``.

    >>> graph = torch.fx.symbolic_trace(lambda x, y: torch.sort(torch.relu_(x), out=(y, ~y))).graph
    >>> [changed_in_place(node) for node in graph.nodes if node.op.startswith("call")]
    [[x], [], [y, invert]]
    """
    if not node.op.startswith("call"):
        return []
    if unstable.is_operator_of_bodies(node.target, "tag_activation_checkpoint"):
        return _changed_in_body(node)
    return list(dict.fromkeys(one for one in pytree.tree_leaves(_written_arguments(node)) if isinstance(one, Node)))


def _written_arguments(node: Node) -> list[Any]:
    """Return the arguments that a call changes, by its schema; those of ``+=`` or ``x[i] = y``, by its name."""
    if isinstance(node.target, OPERATORS):
        return unstable.written_by(node.target, node.args, node.kwargs)
    if not _is_torchs(node) or native_name(node) in _MARKING:
        return []
    if isinstance(node.target, FunctionType):
        return _written_by_function(node, node.target)
    if f"__{native_name(node).strip('_')}__" in _CHANGING:
        return [node.args[0]]
    return [node.kwargs.get("out"), *unstable.written_by(f"aten::{native_name(node)}", node.args, node.kwargs)]


_MARKING = frozenset({"requires_grad_", "retain_grad", "record_stream"})  # they leave the numbers as they are


def _written_by_function(node: Node, function: FunctionType) -> list[Any]:
    """Return the arguments that a Python function changes: ``out``, and the first one if ``inplace`` is true."""
    try:
        given = inspect.signature(function).bind(*node.args, **node.kwargs).arguments
    except TypeError:
        return []
    return [given.get("out"), next(iter(given.values())) if given.get("inplace") else None]


def _changed_in_body(node: Node) -> list[Node]:
    """Return the arguments of a checkpoint that its body changes."""
    body, *given = node.args
    graph = getattr(node.graph.owning_module, str(cast(Node, body).target)).graph
    aliases, placeholders = Aliases(graph), graph.find_nodes(op="placeholder")
    return [
        one
        for one, inner in zip(given, placeholders, strict=True)
        if isinstance(one, Node) and aliases.is_touched(inner)
    ]


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
        opaque = {
            memory
            for node, changed in self.changed.items()
            if len(changed) > 1 or _is_opaque(node)
            for one in changed
            for memory in _memories(one)
        }
        self._pinned = opaque | {memory for memory in self._touched if not self._is_private(memory)}

    def is_pinned(self, node: Node) -> bool:
        """Return whether a node makes or changes memory that keeps its dtype."""
        return any(memory in self._pinned for one in (node, *self.changed[node]) for memory in _memories(one))

    def keeps(self, node: Node) -> bool:
        """Return whether a node changes or views earlier memory that keeps its dtype."""
        pinned = self._pinned & {memory for one in (node, *self.changed[node]) for memory in _memories(one)}
        return any(memory in pinned for one in node.all_input_nodes for memory in _memories(one))

    def is_touched(self, node: Node) -> bool:
        """Return whether the memory of a node is changed somewhere in the graph."""
        return any(memory in self._touched for memory in _memories(node))

    def names(self, node: Node) -> set[Node]:
        """Return a node and all nodes that share its memory."""
        return {name for memory in _memories(node) for name in self._names[memory]} | {node}

    def _is_private(self, memory: int) -> bool:
        makers = [node for node in self._names[memory] if not self.changed[node]]
        return len(makers) <= 1 and not any(node.op in ("placeholder", "get_attr") for node in makers)


def _is_opaque(node: Node) -> bool:
    """Return whether a node, such as a checkpoint or a user's operator, can change what it does not return."""
    if isinstance(node.target, OPERATORS):
        return not str(node.target).startswith("aten.")
    return unstable.is_operator_of_bodies(node.target, "tag_activation_checkpoint")


def _memories(node: Node) -> Iterator[int]:
    leaves: list[Any] = pytree.tree_leaves(node.meta.get("example_value"))
    return (memory for leaf in leaves if isinstance(leaf, Tensor) and (memory := storage_of(leaf)) is not None)
