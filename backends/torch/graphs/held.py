"""Takes objects such as caches apart: a graph returns their tensors, and the rest bypasses it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

CONSTANTS = (int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.SymInt)


class Held:
    """An object as a pytree whose leaves are its tensors; rebuilt, it is a new object of the same class."""

    def __init__(self, tensors: Sequence[Any], rest: Any) -> None:
        self.tensors, self.rest = tensors, rest


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Any] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor | torch.SymInt | torch.SymFloat):
            return None
        place = next((place for place, one in enumerate(self.tensors) if one is obj), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(obj)
        return place


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Any]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Any:
        return self._tensors[pid]


def hold(tree: Any) -> Any:
    """Replace each object of a tree by `Held`, if it is neither a tensor nor a constant, and can be pickled."""
    return pytree.tree_map(_held, tree)


def _held(leaf: Any) -> Any:
    taken = None if isinstance(leaf, CONSTANTS) else taken_apart(leaf)
    return leaf if taken is None else Held(taken.tensors, taken.rest if taken.tensors else leaf)


def taken_apart(leaf: Any) -> Held | None:
    """Return the tensors of an object, and the rest of it; None if it cannot be rebuilt."""
    if isinstance(leaf, Tensor | torch.nn.Module):
        return None
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(leaf)
    except Exception:  # its class may raise anything
        return None
    return Held(pickler.tensors, file.getvalue())


def put_together(taken: Held, tensors: Sequence[Any]) -> Any:
    """Return an object like the one that was taken apart, with other tensors."""
    return _Unpickler(io.BytesIO(taken.rest), tensors).load()


def _flatten(held: Held) -> tuple[list[Any], Any]:
    return list(held.tensors), held.rest


def _unflatten(tensors: Iterable[Any], rest: Any) -> Any:
    given = list(tensors)
    return put_together(Held(given, rest), given) if given else rest


pytree.register_pytree_node(Held, _flatten, _unflatten)
