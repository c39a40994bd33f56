"""The facts about the values of a captured graph while it is decided: their dtypes, and the flow rule's state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import Node

from polyamp.backends.torch import unstable
from polyamp.backends.torch.graphs.nodes import operation_of
from polyamp.flow import INPUT, WEAK, Value
from polyamp.operations import OPERATIONS
from polyamp.plan import Decider


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
    return (
        Value(state) if declared.dtype == torch.float32 else Value("other", str(declared.dtype).removeprefix("torch."))
    )


def constant_of(held: Tensor, decider: Decider, *, divides: bool = False) -> Value:
    """Return the facts about a tensor of the program, from its numbers if they can be read: not if it is sharded."""
    is_plain = type(held) in (Tensor, nn.Parameter) and held.layout == torch.strided
    if held.dtype != torch.float32 or not is_plain or held.is_meta or not held.numel():
        return known_value(held)
    if isinstance(held, nn.Parameter):
        return decider.parameter(float(held.detach().abs().max()))
    return decider.table(held.detach().cpu().resolve_neg().numpy(), divides=divides)


def value_of(known: Known) -> Value:
    """Return the flow rule's facts about a value; a dtype that the user chose comes first."""
    declared = known_value(known.declared)
    return declared if declared.state == "other" or isinstance(known.value, list) else known.value


def made_without_floats(operation: str, given: Sequence[Value], constant: Value) -> Value:
    """Return the facts about the result of an operation on integers, on booleans or on nothing."""
    if operation in ("constant", "fill"):
        return constant
    entry = OPERATIONS.get(operation)
    counts = entry is None or entry.op_class == "full" or operation == "integer"
    if operation in ("one_hot", "random") or (given and not counts and all(one.state == "weak" for one in given)):
        return WEAK
    return INPUT if given or entry is None or operation == "integer" else WEAK


def of_its_type(known: Known, inputs: Sequence[Known]) -> Any:
    """Return the facts about a result, considering its dtype: integers that are made of floats are input data."""
    is_boolean = isinstance(known.declared, Tensor) and known.declared.dtype == torch.bool
    counted = is_integral(known.declared) and any(is_floating(one.declared) for one in inputs)
    return known_value(known.declared) if counted or is_boolean else known.value


def joined(values: Sequence[Value]) -> Value:
    """Return the facts about a float32 value that may be any of several."""
    states = ("strong", "other", "input")
    return next((Value(one.state, one.maker) for state in states for one in values if one.state == state), WEAK)


def numbers_of(node: Node) -> list[float]:
    """Return the Python numbers among a node's operands."""
    arguments = [*node.args, *node.kwargs.values()]
    lists = [one for one in arguments if isinstance(one, list | tuple) and operation_of(node) == "constant"]
    found = [*arguments, *pytree.tree_leaves(lists)]
    return [one for one in found if isinstance(one, int | float) and not isinstance(one, bool)]


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
    """Return the dtype of a value if float32 values are cast to ``dtype``; None casts it to its declared dtype."""
    declared: torch.dtype = known.declared.dtype
    return dtype if dtype is not None and declared == torch.float32 else declared


def fake_as(known: Known, dtype: torch.dtype | None, mode: Any) -> Any:
    """Return the fake of a value in a dtype; see `target_of`."""
    if isinstance(known.fake, tuple | list):
        return known.declared
    if not isinstance(known.fake, Tensor) or known.fake.dtype == (target := target_of(known, dtype)):
        return known.fake
    with unstable.on_fakes(mode):
        return known.fake.to(target)
