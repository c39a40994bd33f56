"""One decision for all ranks: an overflow on any of them skips the step on all, so their parameters and scales agree.

The ranks are those of ``torch.distributed``, which is asked at every call: it may be initialised after an optimizer was
wrapped, and is left alone where it is not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from polyamp.backends.torch.unstable import flattened_shards, is_flattened
from polyamp.errors import InvalidTypeError


def any_rank(flag: Tensor, process_group: Any = None) -> Tensor:
    """Combine an overflow flag over ranks with OR. Every rank of the group has to call it, with a gradient or without.

    >>> any_rank(torch.tensor(1.0))  # without other ranks, what it was given
    tensor(1.)

    Args:
        flag: of any shape, dtype and device, left as it is; not 0 where this rank's gradients were not finite. A rank
            that has no gradient gives 0.
        process_group: a ``torch.distributed.ProcessGroup``. None is the default group, if it is initialised; False
            combines nothing, for gradients that no other rank has a part in.

    Returns:
        Float32 of the same shape and on the same device, equal on every rank: exactly 1.0 or 0.0, since fused
        optimizers compare it with 1. ``flag`` itself where there are no other ranks. On accelerators it is queued on
        the current stream, and the host waits for nothing.
    """
    if not has_peers(process_group):
        return flag
    found = flag.detach().ne(0).to(_device_for(flag.device, process_group), torch.float32)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=process_group)
    return found.to(flag.device)


def has_peers(process_group: Any = None) -> bool:
    """Whether `any_rank` would combine anything: whether this process is one of several ranks of the group.

    >>> has_peers()
    False
    """
    distributed = torch.distributed
    if process_group is False or not (distributed.is_available() and distributed.is_initialized()):
        return False
    return distributed.get_world_size(process_group) > 1  # -1 where this process is not in the group


def add_shards_(total: Tensor, sharded: Any) -> None:
    """Add up, in place, what each rank found in its shard of distributed tensors that lie over ranks like this one.

    Args:
        total: scalar or vector on the device.
        sharded: such a tensor (DTensor). Over the dimensions of the mesh on which it is replicated nothing is added.
    """
    for dimension, placement in enumerate(sharded.placements):
        if placement.is_shard():
            torch.distributed.all_reduce(total, group=sharded.device_mesh.get_group(dimension))


_groups: Any = WeakIdKeyDictionary()  # by parameter


def shard_group(param: Tensor) -> Any:
    """The ranks among which `FullyShardedDataParallel` shared out a parameter's elements, which then is a plain tensor
    on each; None for any other parameter, those of ``fully_shard`` among them, which say themselves where they lie."""
    if not is_flattened(param):
        return None
    if param not in _groups:
        _groups.update((found, group) for found, group in flattened_shards())
        _groups.setdefault(param, None)
    return _groups[param]


def shard_groups(params: Iterable[Tensor]) -> list[Any]:
    """The groups of `shard_group`, each once, in the same order on every rank.

    >>> shard_groups([torch.ones(2)])
    []
    """
    groups = map(shard_group, params)
    return list(dict.fromkeys(group for group in groups if group is not None))


def check_process_group(process_group: Any) -> None:
    """Refuse what is no process group, when an optimizer is wrapped rather than at its first step.

    >>> check_process_group(None), check_process_group(False)
    (None, None)

    Raises:
        InvalidTypeError: neither a process group nor None nor False.
    """
    if process_group is None or process_group is False:
        return
    if torch.distributed.is_available() and isinstance(process_group, torch.distributed.ProcessGroup):
        return
    raise InvalidTypeError(
        "no process group",
        where="wrap_optimizer(process_group=)",
        found=f"{process_group!r} ({type(process_group).__name__})",
        allowed="a torch.distributed.ProcessGroup, None for the default group, or False for none",
        fix="leave process_group= out, or give torch.distributed.new_group(...) or device_mesh.get_group(name)",
    )


def _device_for(device: torch.device, process_group: Any) -> torch.device:
    """Where the group's backend can take the flag: NCCL, for one, takes nothing from the CPU."""
    config = torch.distributed.get_backend_config(process_group)  # such as "cpu:gloo,cuda:nccl"
    types = [part.split(":")[0] for part in config.split(",")]
    return device if device.type in types else torch.device(types[0])
