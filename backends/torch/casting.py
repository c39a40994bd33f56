"""Casts the floating tensors of containers and modules, and leaves everything else as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from polyamp.backends.torch.dtypes import dtype_of


def cast(tree: Any, format_name: str) -> Any:
    """``tree`` with its floating tensors in a format; a module is changed in place, as by ``module.to``.

    Integers, booleans, complex numbers and what is no tensor stay untouched, and what was shared stays shared.

    >>> cast({"w": torch.ones(2), "step": torch.tensor(3), "name": "a"}, "float16")
    {'w': tensor([1., 1.], dtype=torch.float16), 'step': tensor(3), 'name': 'a'}

    Args:
        tree: tensors and modules in dicts, lists, tuples and named tuples.
        format_name: the name of a format, such as ``"bfloat16"``.

    Raises:
        InvalidValueError: an unknown format.
    """
    return cast_to(tree, dtype_of(format_name))


def cast_to(tree: Any, dtype: torch.dtype) -> Any:
    """`cast`, by dtype."""
    done: dict[int, Any] = {}  # a tensor that stands at two places is cast once

    def cast_leaf(leaf: Any) -> Any:
        if id(leaf) not in done:
            done[id(leaf)] = store_module(leaf, dtype) if isinstance(leaf, nn.Module) else cast_tensor(leaf, dtype)
        return done[id(leaf)]

    return map_leaves(cast_leaf, tree)


def cast_tensor(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A floating tensor in ``dtype``, differentiably; any other tensor as it is."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """``tree`` with ``fn`` of its tensors and modules, in containers of the same types."""
    if isinstance(tree, Tensor | nn.Module):
        return fn(tree)
    if isinstance(tree, dict):
        mapped = copy.copy(tree)  # keeps the type, and a defaultdict's factory
        mapped.update((key, map_leaves(fn, value)) for key, value in tree.items())
        return mapped
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_leaves(fn, value) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)([map_leaves(fn, value) for value in tree])
    return tree


def leaves(tree: Any) -> Iterator[Any]:
    """The tensors and modules of ``tree``."""
    found: list[Any] = []
    map_leaves(found.append, tree)
    return iter(found)


def store_module(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Store a module's floating parameters, their gradients and its floating buffers in ``dtype``, in place.

    The `torch.nn.Parameter` objects stay the same, so that optimizers and tied layers keep them. Unlike ``module.to``
    this leaves complex values alone.
    """
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
