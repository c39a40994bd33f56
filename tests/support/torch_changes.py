"""Calls of PyTorch's own database of operators, in place and into others too, and programs around them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

ONE = torch.ones(1, 1)
ANY_NUMBERS = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}  # any memory


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


def calls_of(info: Any, dtype: torch.dtype = torch.float32) -> Iterator[Call]:
    """Yield calls of an operator in its variants, as PyTorch's first sample does: method, in place, ``out=``, alias."""
    if dtype not in info.supported_dtypes("cpu") or info.name.startswith("jiterator"):
        return
    torch.manual_seed(0)
    for sample in itertools.islice(info.sample_inputs_func(info, "cpu", dtype, False), 1):
        args, kwargs = (sample.input, *sample.args), dict(sample.kwargs)
        for one in (info, *info.aliases):
            functions = [one.op, getattr(one, "operator_variant", None), getattr(one, "inplace_operator_variant", None)]
            methods = [method for method in (one.method_variant, one.inplace_variant) if _is_torchs(method)]
            targets = [*filter(_is_torchs, functions), *(method.__name__ for method in methods)]
            yield from (Call(target, args, kwargs) for target in targets)
        if info.supports_out and not isinstance(info.op, FunctionType):
            results = info.op(*args, **kwargs)
            if all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(results)):
                out = pytree.tree_map_only(Tensor, lambda one: torch.zeros(one.shape, dtype=one.dtype), results)
                yield Call(info.op, args, {**kwargs, "out": tuple(out) if isinstance(out, tuple) else out})


def _is_torchs(function: Any) -> bool:
    """Return whether it is a function itself, and not a wrapper of PyTorch's tests."""
    return hasattr(function, "__name__") and not str(getattr(function, "__module__", "")).startswith("torch.testing")


def clone(low: Tensor) -> Tensor:
    return low.clone()


def view(low: Tensor) -> Tensor:
    return (low * 1).view(low.shape)


def half(low: Tensor) -> Tensor:
    return torch.cat([low, low])[: len(low)]


def product(x: Tensor) -> Tensor:
    return (x.reshape(-1, 1) @ ONE).reshape(x.shape)


def read(result: Any, lows: list[Tensor], values: list[Tensor], out: Any) -> Any:
    return result, [one * 2 for one in lows], [one.clone() for one in values], out


PLACES: dict[str, Callable[[Tensor], Tensor] | None] = {"product": None, "clone": clone, "view": view, "half": half}


def program(call: Call, place: str) -> tuple[GraphModule, list[Tensor]]:
    """Return a function that makes the call on a 16-bit value, and reads everything afterwards; and its arguments."""
    node, tensors = call.node()
    graph, lows, make = node.graph, list[Node](), PLACES[place]
    first = next((one for one, tensor in tensors.items() if tensor.is_floating_point() and tensor.dim()), None)
    if first is not None:
        with graph.inserting_before(node):
            lows = [low := graph.call_function(product, (first,))]
            lows += [graph.call_function(make, (low,))] if make else []
        node.replace_input_with(first, lows[-1])
    values = [lows[-1] if one is first else one for one in tensors]
    graph.output(graph.call_function(read, (node, lows, values, node.kwargs.get("out"))))
    is_trained = first is not None and "out" not in call.kwargs
    inputs = [_in_16_bits(one.detach()) for one in tensors.values()]
    return GraphModule(nn.Module(), graph), [
        one.requires_grad_(is_trained and one.is_floating_point()) for one in inputs
    ]


def _in_16_bits(tensor: Tensor) -> Tensor:
    """Return numbers that both 16-bit formats hold."""
    return tensor.bfloat16().half().to(tensor.dtype) if tensor.dtype == torch.float32 else tensor.clone()


Outcome = tuple[Any, Sequence[Tensor]]


def outcome(fn: Callable[..., Any], args: Any, kwargs: Any, parameters: Sequence[Tensor] = ()) -> Outcome:
    """Return what a call with copies of arguments computes and what it leaves in them, and its gradients."""
    copies = pytree.tree_map_only(
        Tensor, lambda one: one.detach().clone().requires_grad_(one.requires_grad), (args, kwargs)
    )
    torch.manual_seed(0)
    results = fn(*copies[0], **copies[1])
    leaves = [one for one in pytree.tree_leaves(results) if isinstance(one, Tensor) and one.requires_grad]
    reals = [torch.view_as_real(one.resolve_conj()) if one.is_complex() else one for one in leaves]
    weights = torch.Generator().manual_seed(1)
    total = sum((one.float() * torch.rand(one.shape, generator=weights)).sum() for one in reals)
    inputs = [one for one in pytree.tree_leaves(copies) if isinstance(one, Tensor) and one.requires_grad]
    needed = [*inputs, *(one for one in parameters if one.requires_grad)] if leaves else []
    gradients = torch.autograd.grad(total, needed, materialize_grads=True) if needed else ()
    return (results, copies), gradients


def judged(
    fn: Callable[..., Any],
    args: Any,
    ahead: Callable[..., Any],
    refusals: type[Exception],
    *,
    same_formats: bool = True,
) -> str:
    """Return ``right``, ``refused`` or what is wrong with what ``ahead`` makes of a function; else ``untaken``."""
    try:
        expected = outcome(fn, args, {})
    except (RuntimeError, TypeError, NameError, ValueError, IndexError):
        if any(one.requires_grad for one in args):  # it may have no gradient
            return judged(fn, [one.detach() for one in args], ahead, refusals, same_formats=same_formats)
        return "untaken"
    try:
        found = outcome(ahead(fn), args, {})
    except refusals:
        return "refused"
    except (RuntimeError, TypeError) as error:
        return f"a bare error: {str(error).partition(chr(10))[0]}"
    return compared(found, expected, same_formats=same_formats)


def compared(ours: Outcome, theirs: Outcome, *, same_formats: bool = True) -> str:
    """Return whether two outcomes are the same except for rounding: ``right``, or what is wrong."""
    if difference(ours[0], theirs[0], same_formats=same_formats) > 0.06:
        return "a wrong value"
    return "a wrong gradient" if difference(ours[1], theirs[1]) > 0.15 else "right"


def difference(ours: Any, theirs: Any, *, same_formats: bool = True) -> float:
    """Return the largest difference of two trees' tensors, relative to the largest number of each."""
    found = 0.0
    for one, other in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
        if isinstance(other, Tensor):
            assert one.shape == other.shape
            assert one.dtype == other.dtype or not same_formats
            ones, others = (
                torch.view_as_real(each.resolve_conj()) if each.is_complex() else each for each in (one, other)
            )
            ones, others = (each.detach().to_dense().double().nan_to_num(7, 7, 7).flatten() for each in (ones, others))
            found = max(found, float((ones - others).norm() / others.norm().clamp(min=1e-3)))
    return found
