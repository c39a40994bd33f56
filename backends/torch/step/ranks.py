"""One decision for all ranks: an overflow on any rank skips the step on all, so parameters and scales stay equal.

The ranks are those of ``torch.distributed``. Every call tests whether it is initialised, since that may happen after
an optimizer was wrapped; if it is not, nothing is communicated.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from polyamp.backends.torch.unstable import flattened_shards, is_flattened
from polyamp.errors import warn_once
from polyamp.settings import LossScaleState

SHOWN = 8  # ranks in a message
BITS = 63  # ranks in one int64, so that the sum of all bits is not negative
HALVES = 2  # of 16 bits in each number that is compared


class RankSet:
    """A set of ranks, stored as one bit for each. Reading it waits for the device."""

    def __init__(self, bits: Tensor, members: Sequence[int] | None, here: int) -> None:
        self._bits, self._members, self._here = bits, members, here

    def ranks(self) -> list[int]:
        """Return the ranks in their order in the group."""
        words: list[int] = self._bits.tolist()
        return [BITS * place + bit for place, word in enumerate(words) for bit in range(BITS) if word >> bit & 1]

    def includes_this(self) -> bool:
        """Return whether this rank is in the set."""
        return self._here in self.ranks()

    def __bool__(self) -> bool:
        return bool(self.ranks())

    def __str__(self) -> str:
        ranks = [rank if self._members is None else self._members[rank] for rank in self.ranks()]
        shown = ", ".join(map(str, ranks[:SHOWN]))
        if len(ranks) > SHOWN:
            return f"{len(ranks)} ranks: {shown}, ..."
        return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


class Decision:
    """The reports of a group's ranks about a step: the words that `decide` summed."""

    def __init__(self, words: Tensor, process_group: Any) -> None:
        self.words, self.process_group = words, process_group
        self._size = torch.distributed.get_world_size(process_group)
        members = None if process_group is None else torch.distributed.get_process_group_ranks(process_group)
        here = torch.distributed.get_rank(process_group)
        self._bits, self._sums = words[: -4 * HALVES], words[-4 * HALVES :].view(2, -1)
        self.overflowed, self.of_bad_losses, self.refusing = (
            RankSet(bits, members, here) for bits in self._bits.view(3, -1)
        )

    def agree(self) -> Tensor:
        """Return whether the loss scales of all ranks are in the same state, from the sums that `decide` explains."""
        sums, squares = self._sums.unbind()
        return sums.square().eq(squares * self._size).all()

    def flag(self, device: torch.device) -> Tensor:
        """Return a float32 scalar on a device: 1.0 if no rank is to step, else 0.0."""
        return (self._bits.any() | ~self.agree()).to(device, torch.float32)


def decide(
    flag: Tensor,
    state: LossScaleState,
    *,
    loss_was_finite: bool | Tensor | None = None,
    refuses: bool = False,
    process_group: Any = None,
) -> Decision:
    """Decide with the other ranks whether to skip a step. Every rank of the group has to call this.

    One all-reduce sums integers (words), always of one shape. Three sets of ranks are among them, to which each rank
    adds its own bit: with 2 ranks, of which rank 1 overflowed, 0b00 + 0b10 is 0b10. The others compare the
    states of the loss scale: with n ranks, n times the sum of squares is the square of the sum only for equal numbers.

    Args:
        flag: one element of any dtype and device, not changed; not 0 if this rank's gradients were not finite. A rank
            without gradients passes 0.
        state: the state of this rank's loss scale.
        loss_was_finite: False if a loss of this rank was inf or NaN.
        refuses: this rank raises an error, and does not wait for the others.
        process_group: a ``torch.distributed.ProcessGroup``; None is the default group.

    Returns:
        What all ranks have reported. On accelerators it is queued on the current stream, and the host does not wait.
    """
    distributed = torch.distributed
    place, bit = divmod(distributed.get_rank(process_group), BITS)
    width = -(-distributed.get_world_size(process_group) // BITS)
    device = _device_for(flag.device, process_group)
    words = torch.zeros(3 * width + 4 * HALVES, dtype=torch.int64, device=device)
    own = words[: 3 * width].view(3, width)[:, place]
    own[0] = flag.detach().ne(0).to(device, torch.int64).reshape(()) * (1 << bit)
    if isinstance(loss_was_finite, Tensor):
        own[1] = loss_was_finite.logical_not().to(device, torch.int64) * (1 << bit)
    elif loss_was_finite is False:
        own[1] = 1 << bit
    if refuses:
        own[2] = 1 << bit
    halves = _halves(state, device)
    words[3 * width :] = torch.cat([halves, halves * halves])
    distributed.all_reduce(words, group=process_group, async_op=refuses)
    return Decision(words, process_group)


def _halves(state: LossScaleState, device: torch.device) -> Tensor:
    """Return the scale's bits and the finite steps in 16-bit halves, whose squares cannot wrap on 32,000 ranks."""
    scale, count = (
        value if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype, device="cpu")
        for value, dtype in ((state.scale, torch.float32), (state.good_steps, torch.int32))
    )
    numbers = torch.stack([one.to(device, torch.int64, non_blocking=True) for one in (scale.view(torch.int32), count)])
    return torch.cat([numbers & 0xFFFF, numbers >> 16 & 0xFFFF])


def _device_for(wanted: torch.device, process_group: Any = None) -> torch.device:
    """Return the device for collectives on tensors of ``wanted``: NCCL, for example, refuses the CPU."""
    backends = torch.distributed.get_backend_config(process_group)  # such as "cpu:gloo,cuda:nccl"
    types = [part.split(":")[0] for part in backends.split(",")]
    return wanted if wanted.type in types else torch.device(types[0])


def report_kept_errors(skipped_in_a_row: int) -> None:
    """Warn once if PowerSGD, a communication hook of DDP, feeds inf or NaN of a skipped step back into later ones."""
    hooks: Any = sys.modules.get("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
    if hooks is None or skipped_in_a_row not in (2, 4, 8, 16) or not has_peers():  # looking takes tenths of a second
        return
    for state in [one for one in gc.get_objects() if type(one) is hooks.PowerSGDState]:
        kept = [*state.error_dict.values(), *state.q_memory_dict.values()]
        if not all(bool(values.isfinite().all()) for values in kept):
            warn_once(
                "PowerSGD keeps inf or NaN of a skipped step and adds it to later gradients, so all later steps are "
                "skipped. After a skipped step call clear() of state.error_dict, state.p_memory_dict and "
                "state.q_memory_dict; or make PowerSGDState(use_error_feedback=False, warm_start=False), or train in "
                "bfloat16."
            )


def least_over_ranks(numbers: Sequence[float]) -> list[float]:
    """Return the least of each number over all ranks, each of which has to call this."""
    if not has_peers():
        return list(numbers)
    least = torch.tensor(numbers, device=_device_for(torch.device("cpu")))
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
    return least.tolist()


def has_peers(process_group: Any = None) -> bool:
    """Return whether this is one of several ranks of the group, which have to decide together."""
    if process_group is False or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    return torch.distributed.get_world_size(process_group) > 1  # -1 if this process is not in the group


def layout_of(tensor: Any) -> Any:
    """Return the mesh and placements of a tensor split over ranks; None if it is whole, or not summed yet."""
    placements = getattr(tensor, "placements", ()) if type(tensor) not in (Tensor, Parameter) else ()
    is_split = placements and not any(placement.is_partial() for placement in placements)
    return (tensor.device_mesh, placements) if is_split else None


def add_shards_(total: Tensor, layout: Any) -> None:
    """Sum over ranks, in place, a total that each rank computed from its shards of one layout."""
    mesh, placements = layout
    for dimension, placement in enumerate(placements):
        if not placement.is_replicate():  # `is_shard` is false for the shards of shards that FSDP2 makes
            torch.distributed.all_reduce(total, group=mesh.get_group(dimension))


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
