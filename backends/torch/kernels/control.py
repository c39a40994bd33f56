"""The loss-scale state on a device: scalar tensors, or packed in one tensor that polyamp's operators read and change.

Packed are ``control``, which a step changes in place, so that a captured CUDA graph goes on from its last replay, and
``report``, which each step makes anew. Both begin with the state: the bits of the scale, and four counts.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyamp.loss_scale import LossScaleState

SIZE = 8  # int32 numbers in `control`, and in `report`
_STATE = len(LossScaleState._fields)
DRAWS = _STATE  # the place in `control` of how many steps were rounded by chance
APPLIED, LOSSES_FINITE = _STATE, _STATE + 1  # the places in `report` of two flags


def unpack(packed: Tensor) -> LossScaleState:
    """The state in ``control`` or ``report``: scalar views.

    >>> report = torch.zeros(SIZE, dtype=torch.int32)
    >>> pack_(report, LossScaleState(8.0, 3, 1, 0, 2))
    >>> unpack(report).scale, unpack(report).good_steps
    (tensor(8.), tensor(3, dtype=torch.int32))
    """
    return LossScaleState(packed.view(torch.float32)[0], *packed[1:_STATE].unbind())


def pack_(packed: Tensor, state: LossScaleState) -> None:
    """Write a state, of numbers or of scalar tensors, in place."""
    packed[:_STATE] = torch.stack(_words(on_device(state, packed.device)))


def report_of(state: LossScaleState, applied: Tensor, losses_finite: Tensor) -> Tensor:
    """The report of a step that no operator made, of scalar tensors on one device.

    >>> state = on_device(LossScaleState(8.0, 3, 1, 0, 2), torch.device("cpu"))
    >>> decode(report_of(state, torch.tensor(True), torch.tensor(True)).tolist())
    (LossScaleState(scale=8.0, good_steps=3, hysteresis=1, skipped_in_a_row=0, skipped=2), True)
    """
    return torch.stack([*_words(state), applied.int(), losses_finite.int()])


def _words(state: LossScaleState) -> list[Tensor]:
    scale, *counts = state
    return [scale.view(torch.int32), *counts]


def applied_flag(report: Tensor) -> Tensor:
    """Whether a step was applied: a boolean view, which costs no kernel."""
    return report.view(torch.bool)[4 * APPLIED]


def decode(report: Sequence[int]) -> tuple[LossScaleState, bool]:
    """The state and whether the losses were finite, of a report that was copied to the host.

    >>> decode([0x41000000, 3, 1, 0, 2, 1, 0, 0])
    (LossScaleState(scale=8.0, good_steps=3, hysteresis=1, skipped_in_a_row=0, skipped=2), False)
    """
    (scale,) = struct.unpack("<f", struct.pack("<i", report[0]))
    return LossScaleState(scale, *report[1:_STATE]), bool(report[LOSSES_FINITE])


def on_device(state: LossScaleState, device: torch.device) -> LossScaleState:
    """The state as scalar tensors: float32 the scale, int32 the counts."""
    scale, *counts = state
    scalars = [_scalar(scale, torch.float32), *(_scalar(count, torch.int32) for count in counts)]
    return LossScaleState(*(scalar.to(device, non_blocking=True) for scalar in scalars))


def is_captured() -> bool:
    """Whether what is called now becomes part of a CUDA graph."""
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return started and torch.cuda.is_current_stream_capturing()


def scale_on(state: LossScaleState, device: torch.device) -> Tensor:
    """The scale of a state as a float32 scalar on a device."""
    if isinstance(state.scale, Tensor):
        return state.scale.to(device)
    return torch.full((), state.scale, dtype=torch.float32, device=device)


def where(condition: Tensor, one: Any, other: Any) -> Tensor:
    """``torch.where`` for `polyamp.advance`, with numbers that stay on the device, rather than sent there each time."""
    if not isinstance(one, Tensor):
        one = kept(one, other.dtype, condition.device)
    if not isinstance(other, Tensor):
        other = kept(other, one.dtype, condition.device)
    return torch.where(condition, one, other)


@functools.cache
def kept(number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A scalar that stays on a device, and that nobody changes."""
    return torch.full((), number, dtype=dtype, device=device)  # a fill, and no copy that waits


def _scalar(value: Any, dtype: torch.dtype) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype, device="cpu")
