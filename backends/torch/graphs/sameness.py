"""Finds values of a captured graph that are the same, and constants: ``x * x`` is a square, ``1 / x`` a reciprocal."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from polyamp.backends.torch.graphs.nodes import native_name, operands_of
from polyamp.flow import specific
from polyamp.operations import OPERATIONS

_SAME_VALUE = frozenset({"identity", "cast"})  # if the dtype stays
_SAME_IF_REAL = frozenset({"conj", "_conj", "real", "conj_physical"})
_DIFFERENT = frozenset({"random", "dropout", "constant", "fill", "custom_call", "optimizer_update"})
_FROM_SHAPES = frozenset({"constant", "fill", "shape"})


class Sameness:
    """Numbers for the values of a graph, equal for equal values; and which of them are constants."""

    # Two values are the same if the same operation made both from the same values. Operations that return their input,
    # such as a copy, a cast to its own type or ``conj`` of real numbers, do not make a new value.

    def __init__(self) -> None:
        self._numbers: dict[Node, int] = {}
        self._made: dict[str, int] = {}
        self._constants: set[Node] = set()

    def add(self, node: Node, operation: str | None, *, is_constant: bool = False, is_changed: bool = False) -> None:
        """Give a number to the result of a node."""
        self._numbers[node] = self._number(node, operation)
        made_of = [one for one in operands_of(node) if isinstance(one.meta.get("example_value"), Tensor)]
        is_pure = operation not in (None, "random", "dropout") and not is_changed
        if is_constant or (is_pure and self._of_constants(operation, made_of)):
            self._constants.add(node)

    def specific(self, node: Node, operation: str) -> str:
        """Return the operation that a node is, considering its operands; see `polyamp.flow.specific`."""
        if operation not in ("mul", "div", "dot"):
            return operation
        first, second = [*_two_operands(node), None, None][:2]
        both = isinstance(first, Node) and isinstance(second, Node)
        of_itself = both and self._numbers.get(first, first) == self._numbers.get(second, second)
        over = self._is_constant(first) and isinstance(second, Node) and not self._is_constant(second)
        return specific("mul" if operation == "dot" and of_itself else operation, of_itself=of_itself, over=over)

    def _number(self, node: Node, operation: str | None) -> int:
        first = next(iter(node.args), None)
        if isinstance(first, Node) and first in self._numbers and _returns_its_input(node, first, operation):
            return self._numbers[first]
        unique = len(self._numbers) + len(self._made)
        if operation not in OPERATIONS or operation in _DIFFERENT or not node.op.startswith("call"):
            return -unique - 1
        call = map_arg((node.args, node.kwargs), self._shown)
        return self._made.setdefault(f"{node.target!r} {call!r}", unique)

    def _shown(self, used: Node) -> Any:
        return _Numbered(self._numbers.get(used, used.name))

    def _of_constants(self, operation: str | None, made_of: list[Node]) -> bool:
        if operation in _FROM_SHAPES:
            return True
        return bool(made_of) and self._constants.issuperset(made_of)

    def _is_constant(self, operand: Any) -> bool:
        if isinstance(operand, Node):
            return operand in self._constants or not isinstance(
                operand.meta.get("example_value", operand), Tensor | Node
            )
        return isinstance(operand, int | float)


class _Numbered:
    """A value as it appears in the text of a call."""

    def __init__(self, number: object) -> None:
        self._number = number

    def __repr__(self) -> str:
        return f"%{self._number}"


def _two_operands(node: Node) -> list[Any]:
    named = [node.kwargs[name] for name in ("input", "self", "other", "tensor", "tensor2") if name in node.kwargs]
    return [*node.args, *named]


def _returns_its_input(node: Node, first: Node, operation: str | None) -> bool:
    if operation not in _SAME_VALUE and native_name(node).partition(".")[0] not in _SAME_IF_REAL:
        return False
    before, after = first.meta.get("example_value"), node.meta.get("example_value")
    if not (isinstance(before, Tensor) and isinstance(after, Tensor)):
        return before is after is None
    return before.dtype == after.dtype and not before.is_complex() and before.shape == after.shape
