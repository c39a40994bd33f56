"""Containers that models take and return: opened one level at a time, and rebuilt with other parts.

Containers are recognised by their kind, not by a list of libraries: mappings, sequences, dataclasses, attrs classes,
and types registered with `torch.utils._pytree`. A rebuilt container is a copy: its ``__init__`` does not run again, and
the original is not changed.

>>> import collections
>>> opened = open_up(collections.deque([torch.ones(1), 2], maxlen=3))
>>> opened.parts, opened.closed([0, 1])
([tensor([1.]), 2], deque([0, 1], maxlen=3))
"""

from __future__ import annotations

import copy
import functools
from collections import UserList, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import is_dataclass
from types import FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn


class Opened(NamedTuple):
    """One level of a container: its parts, and how to rebuild it."""

    parts: list[Any]  # the parts of the container
    closed: Callable[[Sequence[Any]], Any]  # builds a container of the same type from as many other parts


_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def open_up(tree: Any) -> Opened | None:
    """Open a container; return None for everything else."""
    if isinstance(tree, _ATOMS):
        return None
    if isinstance(tree, Mapping):
        return Opened(list(tree.values()), lambda parts: _mapping(tree, parts))
    if isinstance(tree, tuple):
        make = functools.partial(tuple.__new__, type(tree)) if hasattr(tree, "_fields") else type(tree)
        return Opened(list(tree), make)  # the first is like ``_make``, whatever arguments a subclass takes
    if isinstance(tree, list | deque | set | frozenset | UserList):
        return Opened(list(tree), lambda parts: _collection(tree, parts))
    parts, spec = pytree.tree_flatten(tree, is_leaf=lambda one: one is not tree)
    if not (len(parts) == 1 and parts[0] is tree):  # it is registered
        return Opened(parts, lambda others: pytree.tree_unflatten(list(others), spec))
    if isinstance(tree, type):
        return None
    if is_dataclass(tree) or isinstance(tree, SimpleNamespace) or hasattr(type(tree), "__attrs_attrs__"):
        names = list(_attributes(tree))
        return Opened([getattr(tree, name) for name in names], lambda parts: _object(tree, names, parts))
    return None


def hides_tensors(leaf: Any) -> bool:
    """Return whether an object that is not a container has tensors as attributes."""
    if isinstance(leaf, (*_ATOMS, type, Tensor, nn.Module, FunctionType, MethodType, ModuleType, torch.Generator)):
        return False
    return any(isinstance(getattr(leaf, name, None), Tensor) for name in _attributes(leaf))


def _attributes(one: Any) -> Iterator[str]:
    """Yield the names of an object's attributes, in its dictionary and in slots."""
    yield from getattr(one, "__dict__", ())
    for kind in type(one).__mro__:
        slots = vars(kind).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else tuple(slots):
            is_private = slot.startswith("__") and not slot.endswith("__")
            name = f"_{kind.__name__.lstrip('_')}{slot}" if is_private else slot
            if name not in ("__dict__", "__weakref__") and hasattr(one, name):
                yield name


def _mapping(tree: Mapping[Any, Any], parts: Sequence[Any]) -> Any:
    """Return a copy of a mapping with other values, set one by one since Hugging Face's outputs refuse ``update``."""
    if isinstance(tree, MappingProxyType):
        return MappingProxyType(dict(zip(tree, parts, strict=True)))
    if not isinstance(tree, MutableMapping):
        return type(tree)(dict(zip(tree, parts, strict=True)))  # type: ignore[call-arg]
    closed = copy.copy(tree)  # keeps the type, and a defaultdict's factory
    for key, value in zip(tree, parts, strict=True):
        if tree[key] is not value:
            closed[key] = value
    return closed


def _collection(tree: Any, parts: Sequence[Any]) -> Any:
    if isinstance(tree, deque):
        return type(tree)(parts, tree.maxlen)
    if isinstance(tree, list | UserList) and type(tree) is not list:
        closed = copy.copy(tree)  # keeps its attributes
        closed[:] = parts
        return closed
    return type(tree)(parts)


def _object(tree: Any, names: Sequence[str], parts: Sequence[Any]) -> Any:
    """Return a copy of an object with other attribute values, even if it is frozen."""
    if isinstance(tree, SimpleNamespace):
        return type(tree)(**dict(zip(names, parts, strict=True)))
    closed = object.__new__(type(tree))
    for name, value in zip(names, parts, strict=True):
        object.__setattr__(closed, name, value)
    return closed
