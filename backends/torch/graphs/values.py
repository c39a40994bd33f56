"""What is known of the values of a captured graph while it is decided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import Node

from polyamp.backends.torch import unstable
from polyamp.backends.torch.graphs.nodes import operation_of
from polyamp.deciding import Decider
from polyamp.flow import INPUT, WEAK, Value
from polyamp.operations import OPERATIONS


class Known(NamedTuple):
    """What is known of one value of the new graph.

    Attributes:
        node: what has it there.
        fake: a fake of it as it is there; a tuple where it is several, or a number.
        declared: a fake of it as it was in the captured graph.
        value: what the flow rule knows of it; a list where it is several that are known one by one.
        is_constant: whether it is a tensor of the program's own, whose numbers are known.
    """

    node: Any
    fake: Any
    declared: Any
    value: Any = WEAK
    is_constant: bool = False


def map_known(tree: Any, fn: Callable[[Known], Any]) -> Any:
    """A tree with ``fn`` of what is known of its values."""
    return pytree.tree_map_only(Known, fn, tree, is_leaf=lambda leaf: isinstance(leaf, Known))


def known_value(declared: Any, state: str = "weak") -> Value:
    """What is known of a value by its declared dtype, where it is of float32 by its state.

    Integers count, index or label, and become the user's numbers where they are converted; booleans choose.

    >>> known_value(torch.ones(1, dtype=torch.int64)).state, known_value(torch.ones(1, dtype=torch.bool)).state
    ('input', 'weak')
    """
    if not is_floating(declared):
        return INPUT if is_integral(declared) else WEAK
    return (
        Value(state) if declared.dtype == torch.float32 else Value("other", str(declared.dtype).removeprefix("torch."))
    )


def magnitude(held: Any) -> float:
    """What of a constant has to be held: all of a scalar, the largest finite element of a tensor.

    >>> magnitude(torch.tensor([1.0, -4096.0, float("-inf")])), magnitude(-1e9)
    (4096.0, -1000000000.0)
    """
    if not isinstance(held, Tensor):
        return float(held)
    if not held.numel() or not is_floating(held) or held.is_meta or unstable.fake_mode_of([held]):
        return 0.0
    if held.numel() == 1:
        return float(held)
    return float(held.detach().abs().nan_to_num(0.0, 0.0).max())


def constant_of(node: Any, fake: Any, held: Tensor, decider: Decider) -> Known:
    """Return what is known of a tensor that belongs to the program, such as a buffer."""
    value = decider.constant(magnitude(held)) if held.dtype == torch.float32 else known_value(fake)
    return Known(node, fake, fake, value, is_constant=is_floating(held))


def value_of(known: Known) -> Value:
    """What the flow rule knows of a value: a dtype of the user's comes before what was found out."""
    declared = known_value(known.declared)
    return declared if declared.state == "other" or isinstance(known.value, list) else known.value


def made_without_floats(operation: str, given: Sequence[Value], said: Value) -> Value:
    """Return what is known of what an operation makes of integers, of booleans or of nothing.

    Args:
        operation: its canonical name.
        given: what is known of its operands.
        said: what is known of its numbers.
    """
    if operation in ("constant", "fill"):
        return said
    entry = OPERATIONS.get(operation)
    counts = entry is None or entry.op_class == "full" or operation == "integer"
    if operation in ("one_hot", "random") or (given and not counts and all(one.state == "weak" for one in given)):
        return WEAK
    return INPUT if given or operation == "integer" else WEAK


def of_its_type(known: Known, inputs: Sequence[Known]) -> Any:
    """Return what is known of a value by what made it, and by its type: what floats give as integers is data."""
    if isinstance(known.declared, Tensor) and known.declared.dtype == torch.bool:
        return WEAK
    counted = is_integral(known.declared) and any(is_floating(one.declared) for one in inputs)
    return known_value(known.declared) if counted else known.value


def joined(values: Sequence[Value]) -> Value:
    """Return what is known of a float32 value that is one of several."""
    states = ("strong", "other", "input")
    return next((Value(one.state, one.maker) for state in states for one in values if one.state == state), WEAK)


def numbers_of(node: Node) -> list[float]:
    """The Python numbers among a node's operands."""
    said = [*node.args, *node.kwargs.values()]
    lists = [one for one in said if isinstance(one, list | tuple) and operation_of(node) == "constant"]
    found = [*said, *pytree.tree_leaves(lists)]
    return [one for one in found if isinstance(one, int | float) and not isinstance(one, bool)]


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in a tree."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def is_floating(value: Any) -> bool:
    """Whether a value is a floating or complex tensor."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def is_integral(value: Any) -> bool:
    """Whether a value is a tensor of integers, booleans left out."""
    return isinstance(value, Tensor) and not is_floating(value) and value.dtype != torch.bool


def dtypes_of(fake: Any) -> list[torch.dtype | None]:
    """The dtypes of one tensor or of several; None of what is none."""
    return [leaf.dtype if isinstance(leaf, Tensor) else None for leaf in pytree.tree_leaves(fake)]


def target_of(known: Known, dtype: torch.dtype | None) -> torch.dtype:
    """What a value is cast to where ``dtype`` is wanted of float32 ones, or None as declared."""
    declared: torch.dtype = known.declared.dtype
    return dtype if dtype is not None and declared == torch.float32 else declared


def fake_as(known: Known, dtype: torch.dtype | None, mode: Any) -> Any:
    """The fake of a value in a dtype."""
    if isinstance(known.fake, tuple | list):
        return known.declared
    if not isinstance(known.fake, Tensor) or known.fake.dtype == (target := target_of(known, dtype)):
        return known.fake
    with unstable.on_fakes(mode):
        return known.fake.to(target)
