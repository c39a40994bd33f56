"""Calls that change tensors in place, from PyTorch's own database of operators, and programs around them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import Graph, Node

ONE = torch.ones(1, 1)


class Call(NamedTuple):
    """A call of a function, or of the method of its first argument that has this name."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        return (
            f"{self.target if isinstance(self.target, str) else self.target.__name__}{' out=' * ('out' in self.kwargs)}"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (
            getattr(args[0], self.target)(*args[1:], **kwargs)
            if isinstance(self.target, str)
            else self.target(*args, **kwargs)
        )

    def copied(self) -> Call:
        copies = pytree.tree_map_only(Tensor, lambda one: one.detach().clone(), (self.args, self.kwargs))
        return Call(self.target, *copies)

    def node(self) -> tuple[Node, dict[Node, Tensor]]:
        """Return the node of a graph that makes the call, and the tensors that its operands stand for."""
        graph, tensors = Graph(), dict[Node, Tensor]()

        def operand(leaf: Tensor) -> Node:
            found = next((node for node, one in tensors.items() if one is leaf), None)
            node = found or graph.placeholder(f"x{len(tensors)}")
            tensors[node] = leaf
            return node

        args, kwargs = pytree.tree_map_only(Tensor, operand, (self.args, self.kwargs))
        kind = "call_method" if isinstance(self.target, str) else "call_function"
        return graph.create_node(kind, self.target, args, kwargs), tensors


def calls_of(info: Any, samples: int = 1) -> Iterator[Call]:
    """Yield calls of an operator in its variants, as PyTorch's samples do: method, in place, ``out=``, alias."""
    if torch.float32 not in info.supported_dtypes("cpu") or info.name.startswith("jiterator"):
        return
    torch.manual_seed(0)
    for sample in itertools.islice(info.sample_inputs_func(info, "cpu", torch.float32, False), samples):
        args, kwargs = (sample.input, *sample.args), dict(sample.kwargs)
        for one in (info, *info.aliases):
            functions = [one.op, getattr(one, "operator_variant", None), getattr(one, "inplace_operator_variant", None)]
            methods = [method for method in (one.method_variant, one.inplace_variant) if _is_torchs(method)]
            targets = [*filter(_is_torchs, functions), *(method.__name__ for method in methods)]
            yield from (Call(target, args, kwargs) for target in targets)
        if info.supports_out and not isinstance(info.op, FunctionType):
            results = info.op(*args, **kwargs)
            if all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(results)):
                out = pytree.tree_map_only(Tensor, torch.empty_like, results)
                yield Call(info.op, args, {**kwargs, "out": tuple(out) if isinstance(out, tuple) else out})


def _is_torchs(function: Any) -> bool:
    """Return whether it is a function itself, and not a wrapper of PyTorch's tests."""
    return hasattr(function, "__name__") and not str(getattr(function, "__module__", "")).startswith("torch.testing")


PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "product": lambda low: low,
    "clone": torch.clone,
    "view": lambda low: (low * 1).view(low.shape),
    "half": lambda low: torch.cat([low, low])[: len(low)],
}


def program(call: Call, place: str) -> tuple[Callable[..., Any], list[Tensor]]:
    """Return a function that makes the call on a 16-bit value, and reads everything afterwards; and its arguments."""
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    places = [next((at for at, one in enumerate(tensors) if one is leaf), None) for leaf in leaves]
    first = next((at for at, one in enumerate(tensors) if one.is_floating_point() and one.dim()), None)
    make = PLACES[place]

    def run(*given: Tensor) -> Any:
        values, read = list(given), []
        if first is not None:
            low = (given[first].reshape(-1, 1) @ ONE).reshape(given[first].shape)
            values[first] = make(low)
            read += [low, values[first]]
        args, kwargs = pytree.tree_unflatten(
            [leaf if at is None else values[at] for leaf, at in zip(leaves, places, strict=True)], spec
        )
        result = call(*args, **kwargs)
        return result, [one * 2 for one in read], [one.clone() for one in values], call.kwargs and kwargs.get("out")

    return run, [_in_16_bits(one.detach()) for one in tensors]


def _in_16_bits(tensor: Tensor) -> Tensor:
    """Return numbers that both 16-bit formats hold."""
    return tensor.bfloat16().half().to(tensor.dtype) if tensor.dtype == torch.float32 else tensor.clone()


def difference(ours: Any, theirs: Any) -> float:
    """Return the largest difference of two trees' tensors, relative to the largest number of each."""
    found = 0.0
    for one, other in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
        if isinstance(other, Tensor):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            ones, others = (torch.view_as_real(each) if each.is_complex() else each for each in (one, other))
            ones, others = (each.detach().double().nan_to_num(7, 7, 7).flatten() for each in (ones, others))
            found = max(found, float((ones - others).norm() / others.norm().clamp(min=1e-3)))
    return found
