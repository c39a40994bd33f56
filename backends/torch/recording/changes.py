"""What a step changes, and how all of it is undone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polyamp.backends.torch import unstable
from polyamp.backends.torch.recording import widened


class Changes:
    """Undoes what is told to it: tensors that are written to, gradients, and what modules hold.

    >>> weight = torch.ones(2)
    >>> changes = Changes()
    >>> changes.before(torch.ops.aten.mul_.Tensor, [weight, 2], {})
    >>> _ = weight.mul_(2)
    >>> changes.undo()
    >>> weight
    tensor([1., 1.])
    """

    def __init__(self) -> None:
        self._new: set[int] = set()  # storages that were made meanwhile
        self._kept: dict[Any, tuple[Tensor, Tensor, int]] = {}
        self._gradients: dict[Tensor, Tensor | None] = {}
        self._modules: dict[nn.Module, _Attributes] = {}

    def before(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """An operator is about to run: keep what it will change, if that was there before."""
        for tensor in map(unstable.local_shard, _written(op, args, kwargs)):
            key = unstable.storage_of(tensor)
            if key is None or key in self._new or isinstance(tensor, widened.Widened) or not _has_memory(tensor):
                continue
            place = key, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
            if place not in self._kept and not unstable.is_fake(tensor):
                with unstable.with_data():
                    self._kept[place] = tensor, tensor.detach().clone(), tensor._version

    def made(self, out: Any, args: Sequence[Any]) -> None:
        """An operator has run: what it made is new."""
        results = _storages(widened.tensors([out]))
        if results:
            self._new |= results - _storages(widened.tensors(args))

    def take_gradient(self, leaf: Tensor) -> None:
        """Keep a leaf's gradient, and let it have none."""
        if leaf not in self._gradients:
            self._gradients[leaf] = leaf.grad
            leaf.grad = None

    def keep_module(self, root: nn.Module) -> None:
        """Keep what a module and its parts hold, their modes among it."""
        for module in root.modules():
            if module not in self._modules:
                self._modules[module] = _Attributes(module)

    @torch.no_grad()
    def undo(self) -> None:
        """Bring everything back."""
        for tensor, value, version in reversed(self._kept.values()):
            if _has_memory(tensor):
                tensor.copy_(value)
                unstable.set_version(tensor, version)
        for leaf, gradient in self._gradients.items():
            leaf.grad = gradient
        for attributes in self._modules.values():
            attributes.restore()


class _Attributes:
    """What a module holds, by name."""

    def __init__(self, module: nn.Module) -> None:
        self._holders = [vars(module), module._parameters, module._buffers]
        self._before = [dict(holder) for holder in self._holders]

    def restore(self) -> None:
        for holder, before in zip(self._holders, self._before, strict=True):
            for name in [name for name in holder if name not in before]:
                del holder[name]
            holder.update(before)


def _written(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterable[Tensor]:
    """What an operator changes. Those of batch norm do not say of the running statistics that they change them."""
    yield from widened.written(op, args, kwargs)
    if "batch_norm" in op.name():
        yield from widened.tensors(args[3:5])


def _has_memory(tensor: Tensor) -> bool:
    """``fully_shard`` frees the memory of tensors that it goes on using."""
    return not tensor.numel() or tensor.untyped_storage().nbytes() > 0


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {key for one in tensors if (key := unstable.storage_of(one)) is not None}
