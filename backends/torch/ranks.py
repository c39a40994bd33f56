"""One decision for all ranks: an overflow on any rank skips the step on all, so parameters and scales stay equal.

The ranks are those of ``torch.distributed``. Every call tests whether it is initialised, since that may happen after
an optimizer was wrapped; if it is not, nothing is communicated.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from polyamp.backends.torch.unstable import flattened_shards, is_flattened

SHOWN = 8  # ranks in a message
BITS = 63  # ranks in one int64, so that the sum of all bits is not negative


class OverflowedRanks:
    """The ranks whose gradients or losses were not finite. Reading them waits for the device."""

    def __init__(self, bits: Tensor, members: Sequence[int] | None, here: int) -> None:
        self._bits, self._members, self._here = bits, members, here

    def ranks(self) -> list[int]:
        """Return the ranks in their order in the group."""
        words = [functools.reduce(operator.or_, word) for word in zip(*self._rows(), strict=True)]
        return [BITS * place + bit for place, word in enumerate(words) for bit in range(BITS) if word >> bit & 1]

    def includes_this(self) -> bool:
        """Return whether this rank is one of them."""
        return self._here in self.ranks()

    def __str__(self) -> str:
        ranks = [rank if self._members is None else self._members[rank] for rank in self.ranks()]
        shown = ", ".join(map(str, ranks[:SHOWN]))
        if len(ranks) > SHOWN:
            return f"{len(ranks)} ranks: {shown}, ..."
        return f"rank{'s' if len(ranks) > 1 else ''} {shown}"

    def _rows(self) -> list[list[int]]:
        rows: list[list[int]] = self._bits.reshape(-1, self._bits.shape[-1]).tolist()
        return rows


def any_rank(flag: Tensor, process_group: Any = None) -> tuple[Tensor, OverflowedRanks | None]:
    """Combine an overflow flag over ranks with OR. Every rank of the group has to call it, with or without a gradient.

    Each rank sets one bit of its own, so the sum over ranks is the set of those that overflowed: with 2 ranks, of which
    rank 1 overflowed, 0b00 + 0b10 is 0b10. One all-reduce thus decides and names the ranks.

    >>> any_rank(torch.tensor(1.0))  # unchanged without other ranks
    (tensor(1.), None)

    Args:
        flag: of any shape, dtype and device, not changed; not 0 if this rank's gradients were not finite. A rank
            without gradients passes 0.
        process_group: a ``torch.distributed.ProcessGroup``. None is the default group, if it is initialised; False
            combines nothing, for gradients that no other rank has a part of.

    Returns:
        Float32 of the same shape and on the same device, equal on every rank: exactly 1.0 or 0.0, since fused
        optimizers compare it with 1; and the ranks that overflowed. Without other ranks ``flag`` itself, and None. On
        accelerators it is queued on the current stream, and the host does not wait.
    """
    if not has_peers(process_group):
        return flag, None
    distributed = torch.distributed
    here, size = distributed.get_rank(process_group), distributed.get_world_size(process_group)
    members = None if process_group is None else distributed.get_process_group_ranks(process_group)
    device = _device_for(flag.device, process_group)
    bits = torch.zeros((*flag.shape, -(-size // BITS)), dtype=torch.int64, device=device)
    bits[..., here // BITS] = flag.detach().ne(0).to(device, torch.int64) * (1 << here % BITS)
    distributed.all_reduce(bits, group=process_group)
    return bits.ne(0).any(-1).to(flag.device, torch.float32), OverflowedRanks(bits, members, here)


def _device_for(wanted: torch.device, process_group: Any = None) -> torch.device:
    """Return the device on which ranks combine tensors of a device: NCCL, for example, refuses those of the CPU."""
    backends = torch.distributed.get_backend_config(process_group)  # such as "cpu:gloo,cuda:nccl"
    types = [part.split(":")[0] for part in backends.split(",")]
    return wanted if wanted.type in types else torch.device(types[0])


def least_over_ranks(numbers: Sequence[float]) -> list[float]:
    """Return the least of each number over all ranks, each of which has to call this."""
    if not has_peers():
        return list(numbers)
    least = torch.tensor(numbers, device=_device_for(torch.device("cpu")))
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
    return least.tolist()


def has_peers(process_group: Any = None) -> bool:
    """Return whether `any_rank` would combine anything: whether this process is one of several ranks of the group."""
    if process_group is False or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    return torch.distributed.get_world_size(process_group) > 1  # -1 if this process is not in the group


def add_shards_(total: Tensor, sharded: Any) -> None:
    """Sum a total over ranks, in place, that each rank computed from its shards of distributed tensors."""
    for dimension, placement in enumerate(sharded.placements):
        if placement.is_shard():
            torch.distributed.all_reduce(total, group=sharded.device_mesh.get_group(dimension))


_groups: Any = WeakIdKeyDictionary()  # by parameter


def shard_group(param: Tensor) -> Any:
    """Return the ranks over which `FullyShardedDataParallel` split a parameter; on each rank it is a plain tensor."""
    # None for any other parameter, including those of ``fully_shard``, which carry their own placements.
    if not is_flattened(param):
        return None
    if param not in _groups:
        _groups.update((flat, group) for flat, group in flattened_shards())
        _groups.setdefault(param, None)
    return _groups[param]
