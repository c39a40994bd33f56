"""The changes that a step makes, and how to undo all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from polyamp.backends.torch import unstable
from polyamp.backends.torch.recording import widening


class Changes:
    """Undoes the changes reported to it: writes to tensors, gradients, and the attributes of modules and objects."""

    def __init__(self) -> None:
        self._new: set[int] = set()  # storages that were created meanwhile
        self._kept: dict[Any, tuple[Tensor, Tensor, int]] = {}
        self._gradients: dict[Tensor, Tensor | None] = {}
        self._modules: set[nn.Module] = set()
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []  # of an object, and what they were

    def before(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Save the tensors that an operator will change when it runs, if they existed before the step."""
        for tensor in map(unstable.local_shard, _written(op, args, kwargs)):
            key = unstable.storage_of(tensor)
            if key is None or key in self._new or isinstance(tensor, widening.Widened) or not _has_memory(tensor):
                continue
            place = key, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
            if place not in self._kept and not unstable.is_fake(tensor):
                with unstable.with_data():
                    self._kept[place] = tensor, tensor.detach().clone(), tensor._version

    def made(self, out: Any, args: Sequence[Any]) -> None:
        """Record that the results of an operator, which has run, did not exist before the step."""
        results = _storages(widening.tensors([out]))
        if results:
            self._new |= results - _storages(widening.tensors(args))

    def take_gradient(self, leaf: Tensor) -> None:
        """Save a leaf's gradient and set it to None."""
        if leaf not in self._gradients:
            self._gradients[leaf] = leaf.grad
            leaf.grad = None

    def keep_module(self, root: nn.Module) -> None:
        """Save the attributes of a module and its parts, including their modes."""
        for module in root.modules():
            if module not in self._modules:
                self._modules.add(module)
                holders = (vars(module), module._parameters, module._buffers)
                self._attributes += [(holder, dict(holder)) for holder in holders]

    def keep_objects(self, objects: Iterable[Any]) -> None:
        """Save the attributes of objects, with copies of dicts, lists and sets."""
        for one in objects:
            values = vars(one).items()
            saved = {name: copy(value) if isinstance(value, dict | list | set) else value for name, value in values}
            self._attributes.append((vars(one), saved))

    @torch.no_grad()
    def undo(self) -> None:
        """Restore everything."""
        for tensor, value, version in reversed(self._kept.values()):
            if _has_memory(tensor):
                tensor.copy_(value)
                unstable.set_version(tensor, version)
        for leaf, gradient in self._gradients.items():
            leaf.grad = gradient
        for attributes, before in self._attributes:
            for name in attributes.keys() - before.keys():
                del attributes[name]
            attributes.update(before)


def _written(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterable[Tensor]:
    """Yield the tensors that an operator changes, with batch norm's running statistics, which its schema omits."""
    yield from widening.written(op, args, kwargs)
    if "batch_norm" in op.name():
        yield from widening.tensors(args[3:5])


def _has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has memory: ``fully_shard`` frees it for tensors that it uses again later."""
    return not tensor.numel() or tensor.untyped_storage().nbytes() > 0


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {key for one in tensors if (key := unstable.storage_of(one)) is not None}
