"""The facts about a graph's values while it is decided: dtypes, the flow rule's state, and which are equal.

For example, in ``(x @ w) * (x @ w)`` both operands have one number, so the flow rule sees a square.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_arg

from polyamp.backends.torch import unstable
from polyamp.backends.torch.dtypes import name_of
from polyamp.backends.torch.graphs.graph import native_name, operands_of, operation_of, product_of
from polyamp.flow import INPUT, WEAK, Value, largest_integer
from polyamp.numbering import Numbering
from polyamp.operations import OPERATIONS
from polyamp.plan import Decider
from polyamp.readers import factor


class Known(NamedTuple):
    """The facts about one value of the new graph."""

    node: Any  # the node that has the value there
    fake: Any  # a fake with its dtype there; a tuple for several values, or a number
    declared: Any  # a fake with its dtype in the captured graph
    value: Any = WEAK  # the flow rule's facts about it; a list with one item for each of several values
    number: int | None = None  # equal for equal values; see `polyamp.numbering`
    tensor: Tensor | None = None  # the tensor itself, if it belongs to the program and its numbers are known


def map_known(tree: Any, fn: Callable[[Known], Any]) -> Any:
    """Apply ``fn`` to the facts about the values of a tree."""
    return pytree.tree_map_only(Known, fn, tree, is_leaf=lambda leaf: isinstance(leaf, Known))


def known_value(declared: Any, state: str = "weak") -> Value:
    """Return the facts about a value from its declared dtype alone; ``state`` is for float32 values."""
    # Integers count, index or label: converted to float, they are input data. Booleans only select.
    if not is_floating(declared):
        return INPUT if is_integral(declared) else WEAK
    return Value(state) if declared.dtype == torch.float32 else Value("other", name_of(declared.dtype))


def is_readable(held: Tensor) -> bool:
    """Return whether the numbers of a tensor can be read: not if it is sharded."""
    is_plain = type(held) in (Tensor, nn.Parameter) and held.layout == torch.strided
    return is_plain and not held.is_meta and held.numel() > 0


def constant_of(held: Tensor, decider: Decider, *, divides: bool = False) -> Value:
    """Return the facts about a tensor of the program, from its numbers if they can be read."""
    if held.dtype != torch.float32 or not is_readable(held):
        return known_value(held)
    if isinstance(held, nn.Parameter):
        return decider.parameter(float(held.detach().abs().max()))
    return decider.table(held.detach().cpu().resolve_neg().numpy(), divides=divides)


def value_of(known: Known) -> Value:
    """Return the flow rule's facts about a value; by dtype alone if the user chose the dtype."""
    declared = known_value(known.declared)
    return declared if declared.state == "other" or isinstance(known.value, list) else known.value


def value_without_floats(operation: str, given: Sequence[Value], constant: Value) -> Value:
    """Return the facts about the result of an operation on integers, on booleans or on nothing."""
    if operation in ("constant", "fill"):
        return constant
    entry = OPERATIONS.get(operation)
    counts = entry is None or entry.op_class == "full" or operation == "integer"
    if operation in ("one_hot", "random") or (given and not counts and all(one.state == "weak" for one in given)):
        return WEAK
    return INPUT if given or entry is None or operation == "integer" else WEAK


def value_by_type(known: Known, inputs: Sequence[Known]) -> Any:
    """Return the facts about a result; by its dtype alone for booleans, and for integers made of floats."""
    is_boolean = isinstance(known.declared, Tensor) and known.declared.dtype == torch.bool
    counted = is_integral(known.declared) and any(is_floating(one.declared) for one in inputs)
    return known_value(known.declared) if counted or is_boolean else known.value


def join_values(values: Sequence[Value]) -> Value:
    """Return the facts about a float32 value that is one of several, unknown which."""
    states = ("strong", "other", "input")
    return next((Value(one.state, one.maker) for state in states for one in values if one.state == state), WEAK)


def numbers_of(node: Node) -> list[float]:
    """Return the Python numbers among a node's operands."""
    arguments = [*node.args, *node.kwargs.values()]
    lists = [one for one in arguments if isinstance(one, list | tuple) and operation_of(node) == "constant"]
    found = [*arguments, *pytree.tree_leaves(lists)]
    return [one for one in found if isinstance(one, int | float) and not isinstance(one, bool)]


def largest_in(node: Node, known: Mapping[Node, float]) -> float:
    """Return how large a result's integers can be; ``known`` has this number for earlier values."""
    operation, limit = operation_of(node) or "", _largest_of_dtype(node)
    if native_name(node).startswith("arange"):
        return max(map(abs, numbers_of(node))) if not node.all_input_nodes else limit
    if operation in ("constant", "fill", "one_hot"):
        return max(map(abs, numbers_of(node)), default=0) if "tensor" in native_name(node) else 0
    inputs = [known.get(one, _largest_of_dtype(one)) for one in operands_of(node)]
    return largest_integer(operation, inputs, limit)


def _largest_of_dtype(node: Node) -> float:
    example = node.meta.get("example_value")
    if not isinstance(example, Tensor):
        return 0  # a size
    if is_floating(example):
        return math.inf
    return float(torch.iinfo(example.dtype).max) if is_integral(example) else 1


def factor_of(node: Node, operation: str) -> float:
    """Return the number by which an operation multiplies its operand; ``alpha`` multiplies the second."""
    alpha = node.kwargs.get("alpha")
    return float(alpha) if isinstance(alpha, int | float) else factor(operation, numbers_of(node))


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in a tree."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def is_floating(value: Any) -> bool:
    """Return whether a value is a floating or complex tensor."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def is_integral(value: Any) -> bool:
    """Return whether a value is a tensor of integers; booleans are not."""
    return isinstance(value, Tensor) and not is_floating(value) and value.dtype != torch.bool


def dtypes_of(fake: Any) -> list[torch.dtype | None]:
    """Return the dtypes of one tensor or of several, with None for everything else."""
    return [leaf.dtype if isinstance(leaf, Tensor) else None for leaf in pytree.tree_leaves(fake)]


def target_of(known: Known, dtype: torch.dtype | None) -> torch.dtype:
    """Return ``dtype``, unless that is None or the value is not declared float32: then the declared dtype."""
    declared: torch.dtype = known.declared.dtype
    return dtype if dtype is not None and declared == torch.float32 else declared


def fake_as(known: Known, dtype: torch.dtype | None, mode: Any) -> Any:
    """Return a value's fake tensor in a dtype; see `target_of`."""
    if isinstance(known.fake, tuple | list):
        return known.declared
    if not isinstance(known.fake, Tensor) or known.fake.dtype == (target := target_of(known, dtype)):
        return known.fake
    with unstable.on_fakes(mode):
        return known.fake.to(target)


# --- equal values -----------------------------------------------------------------------------------------------------

_SYNONYMS = frozenset({"add", "sub", "mul", "div", "neg", "abs"})  # whatever function or operator computes them
_SAME_IF_REAL = frozenset({"conj", "_conj", "real", "conj_physical"})
_RANDOM = frozenset({"random", "dropout", "attention", "lstm_cell", "gru_cell", "rnn_cell"})  # or may be


class Numbers:
    """The numbers of the values of a graph and its bodies, by node; see `polyamp.numbering`."""

    def __init__(self) -> None:
        self._numbering = Numbering()
        self._literals = self._numbering.new(is_constant=True)  # an input of every call: one without others is constant
        self._numbers: dict[Node, int] = {}
        self.records = True

    def __getitem__(self, node: Node) -> int:
        return self._numbers[node]

    def add(self, node: Node, *, is_constant: bool = False) -> None:
        """Give a node a number that no other has, as for an argument or changed memory."""
        self._numbers[node] = self._numbering.new(_shape(node), is_constant=is_constant)

    def add_same(self, node: Node, other: Any) -> None:
        """Give a node the number of another node, or of a Python number."""
        self._numbers[node] = self._numbers[other] if isinstance(other, Node) else self._literals

    def add_call(self, node: Node, operation: str | None) -> None:
        """Give the result of a call its number, which differs if gradients are not recorded."""
        example = node.meta.get("example_value")
        if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(example)):  # a size: the text has it
            self._numbers[node] = self._numbering.of("shape", [self._literals], str(example))
            return
        if operation not in OPERATIONS or operation in _RANDOM or native_name(node).startswith("rrelu"):
            self.add(node)
            return
        skipped = 1 if operation == "fill" else 0  # its first argument has the shape alone
        inputs = [*(self._numbers[used] for used in operands_of(node)[skipped:]), self._literals]
        call = map_arg((node.args[skipped:], node.kwargs), lambda used: {"%": self._numbers[used]})
        kind = (example.dtype, example.device) if isinstance(example, Tensor) else None
        number = self._numbering.of(_name(node, operation), inputs, f"{call!r} {kind}", _shape(node))
        self._numbers[node] = number if self.records else self._numbering.of("stop_gradient", [number])

    def is_constant(self, node: Node) -> bool:
        """Return whether a value is a constant, or made of constants alone."""
        return self._numbering.is_constant(self._numbers[node])

    def specific(self, node: Node, operation: str) -> str:
        """Return the canonical name of a node's operation, which can depend on the operands."""
        if operation in ("matmul", "tensordot"):
            return self._product(node, operation)
        if operation not in ("mul", "div", "dot"):
            return operation
        named = [node.kwargs[name] for name in ("input", "self", "other", "tensor", "tensor2") if name in node.kwargs]
        operands: list[Any] = [*node.args, *named, None, None]
        first, second = (self._numbers[one] if isinstance(one, Node) else self._literals for one in operands[:2])
        found = self._numbering.specific("mul" if operation == "dot" else operation, first, second)
        return operation if found == "mul" else found

    def _product(self, node: Node, operation: str) -> str:
        product = product_of(node)
        if product is None:
            return operation
        if len(product.operands) < 2:  # an einsum of one tensor
            return "transpose" if product.terms == 1 else "sum"
        numbers = map(self._numbers.__getitem__, product.operands)
        found = self._numbering.product(numbers, product.terms, is_aligned=product.is_aligned)
        return operation if found == "matmul" else found


def _name(node: Node, operation: str) -> str:
    """Return the name of a call for the numbering: one name for all functions that compute the same numbers."""
    native = native_name(node).partition(".")[0]
    before, after = (one.meta.get("example_value") for one in (next(iter(operands_of(node)), node), node))
    if native == "detach":
        return "stop_gradient"
    if isinstance(before, Tensor) and isinstance(after, Tensor) and before.dtype == after.dtype:
        returns_input = operation in ("identity", "cast") or (native in _SAME_IF_REAL and not before.is_complex())
        if returns_input and before.device == after.device:
            return "identity"
        is_reshape = operation == "reshape" and native != "as_strided"
        takes_all = operation == "slice" and len(node.all_input_nodes) == 1 and "[" not in repr(node.args[1:])
        if (is_reshape or takes_all) and str(before.numel()) == str(after.numel()):
            return "reshape"
    return operation if operation in _SYNONYMS and native != "rsub" else native_name(node)


def _shape(node: Node) -> tuple[str, ...] | None:
    example = node.meta.get("example_value")
    return tuple(map(str, example.shape)) if isinstance(example, Tensor) else None
