"""Casts the floating tensors of containers and modules, and leaves everything else unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from polyamp.backends.torch.containers import hides_tensors, open_up
from polyamp.backends.torch.dtypes import dtype_of
from polyamp.errors import kind_of, warn_once


def cast(tree: Any, format_name: str) -> Any:
    """Return ``tree`` with its floating tensors in a format; a module is changed in place, as by ``module.to``.

    Everything else is unchanged: integers, booleans, complex numbers, other objects. A shared tensor stays shared.

    >>> cast({"w": torch.ones(2), "step": torch.tensor(3), "name": "a"}, "float16")
    {'w': tensor([1., 1.], dtype=torch.float16), 'step': tensor(3), 'name': 'a'}

    Args:
        tree: tensors and modules in containers: mappings, sequences, sets, named tuples, dataclasses, attrs classes and
            types that are registered with `torch.utils._pytree`. They keep their types.
        format_name: the name of a format, such as ``"bfloat16"``.

    Raises:
        InvalidValueError: the format is unknown.

    Warns:
        PolyampWarning: an object of another class has tensors; these keep their format.
    """
    return cast_to(tree, dtype_of(format_name))


def cast_to(tree: Any, dtype: torch.dtype, *, modules: bool = True) -> Any:
    """Cast as `cast` does, to a dtype; if ``modules`` is false, modules in the tree are unchanged."""
    done: dict[int, Any] = {}  # a shared tensor is cast once

    def cast_leaf(leaf: Any) -> Any:
        if id(leaf) not in done:
            if not isinstance(leaf, nn.Module):
                done[id(leaf)] = cast_tensor(leaf, dtype)
            else:
                done[id(leaf)] = store_module(leaf, dtype) if modules else leaf
        return done[id(leaf)]

    return map_leaves(cast_leaf, tree, others=_report_unknown)


def cast_tensor(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a floating tensor, differentiably; return any other tensor unchanged."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _report_unknown(leaf: Any) -> None:
    """Warn once of a class whose tensors are not cast, since its objects are not opened or cannot be rebuilt."""
    if not torch.compiler.is_compiling() and (hides_tensors(leaf) or open_up(leaf) is not None):
        kind = kind_of(leaf)
        warn_once(
            f"a {kind} was not understood: its tensors keep their format. Pass the tensors in a dict, tuple or "
            "dataclass, or register the class: torch.utils._pytree.register_pytree_node.",
        )


Others = Callable[[Any], None] | None


def map_leaves(fn: Callable[[Any], Any], tree: Any, *, others: Others = None) -> Any:
    """Apply ``fn`` to the tensors and modules of ``tree``, and return containers of the same types."""
    return _mapped(fn, tree, others, {})


def _mapped(fn: Callable[[Any], Any], tree: Any, others: Others, done: dict[int, tuple[Any, Any]]) -> Any:
    if isinstance(tree, Tensor | nn.Module):
        return fn(tree)
    if torch.compiler.is_compiling():  # before torch 2.13 Dynamo knows no id of a container
        return _rebuilt(fn, tree, others, done)
    if id(tree) not in done:
        done[id(tree)] = tree, tree  # the result for a container that contains itself
        done[id(tree)] = tree, _rebuilt(fn, tree, others, done)
    return done[id(tree)][1]


def _rebuilt(fn: Callable[[Any], Any], tree: Any, others: Others, done: dict[int, tuple[Any, Any]]) -> Any:
    if type(tree) is dict:
        return {key: _mapped(fn, value, others, done) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)([_mapped(fn, value, others, done) for value in tree])
    opened = open_up(tree)
    if opened is None:
        if others is not None:
            others(tree)
        return tree
    parts = [_mapped(fn, part, others, done) for part in opened.parts]
    if all(one is other for one, other in zip(parts, opened.parts, strict=True)):
        return tree
    try:
        return opened.closed(parts)
    except Exception:
        if others is None:
            raise
        others(tree)
        return tree


def leaves(tree: Any) -> Iterator[Any]:
    """Return the tensors and modules of ``tree``."""
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    map_leaves(note, tree)
    return iter(found)


def store_module(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Store a module's floating parameters, with their gradients, and floating buffers in ``dtype``, in place."""
    # The `torch.nn.Parameter` objects stay the same, so optimizers and tied layers keep them. Unlike ``module.to`` this
    # leaves complex values unchanged.
    for parameter in module.parameters():
        store_parameter(parameter, dtype)
    stored: dict[int, Tensor] = {}
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, stored.setdefault(id(buffer), cast_tensor(buffer, dtype)))
    return module


def store_parameter(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Change the dtype of one floating parameter, and of its gradient, in place."""
    if not parameter.is_floating_point() or parameter.dtype == dtype:
        return
    gradient, parameter.grad = parameter.grad, None
    parameter.data = parameter.data.to(dtype)
    if gradient is not None:
        parameter.grad = gradient.to(dtype)
