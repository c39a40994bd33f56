"""The loss-scale state on a device: scalar tensors, or packed in one tensor that polyamp's operators read and change.

There are two packed tensors: ``control``, which a step changes in place, so that a captured CUDA graph continues from
its last replay, and ``report``, which each step creates. Both start with the state: its counts, and its two scales as
float32 bits.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.unstable import has_context
from polyamp.errors import UsageError
from polyamp.settings import TYPES, LossScaleState

SIZE = 16  # int32 numbers in `control`, and in `report`
_STATE = len(LossScaleState._fields)  # the first and the last are float32
_DTYPES = {float: torch.float32, int: torch.int32}
APPLIED, LOSSES_FINITE = _STATE, _STATE + 1  # the indices in `report` of two flags


def unpack(packed: Tensor) -> LossScaleState:
    """Return the state in ``control`` or ``report`` as scalar views."""
    reals, counts = packed.view(torch.float32), packed[1 : _STATE - 1].unbind()
    return LossScaleState._make((reals[0], *counts, reals[_STATE - 1]))


def pack_(packed: Tensor, state: LossScaleState) -> None:
    """Write a state of numbers or scalar tensors in place."""
    packed[:_STATE] = torch.stack(_words(on_device(state, packed.device)))


def report_of(state: LossScaleState, applied: Tensor, losses_finite: Tensor) -> Tensor:
    """Return the report of a step made without polyamp's operators, from scalar tensors on one device."""
    return torch.stack([*_words(state), applied.int(), losses_finite.int()])


def _words(state: LossScaleState) -> list[Tensor]:
    scale, *counts, overflow_scale = state
    return [scale.view(torch.int32), *counts, overflow_scale.view(torch.int32)]


def applied_flag(report: Tensor) -> Tensor:
    """Return whether a step was applied, as a boolean view, which needs no kernel."""
    return report.view(torch.bool)[4 * APPLIED]


def decode(report: Sequence[int]) -> tuple[LossScaleState, bool]:
    """Return the state, and whether the losses were finite, from a report that was copied to the host."""
    scale, overflow_scale = struct.unpack("<2f", struct.pack("<2i", report[0], report[_STATE - 1]))
    state = LossScaleState._make((scale, *report[1 : _STATE - 1], overflow_scale))
    return state, bool(report[LOSSES_FINITE])


def on_device(state: LossScaleState, device: torch.device) -> LossScaleState:
    """Return the state as scalar tensors: scales in float32, counts in int32."""
    scalars = (
        value if isinstance(value, Tensor) else torch.tensor(value, dtype=_DTYPES[kind], device="cpu")
        for value, kind in zip(state, TYPES, strict=True)
    )
    return LossScaleState(*(scalar.to(device, non_blocking=True) for scalar in scalars))


def is_captured() -> bool:
    """Return whether a CUDA graph is being captured, without initialising a GPU that is not in use yet."""
    started = torch.cuda.is_initialized() and has_context(torch.cuda.current_device())  # type: ignore[no-untyped-call]
    return started and torch.cuda.is_current_stream_capturing()


def check_first_use() -> None:
    """Raise while a CUDA graph is captured: a capture runs nothing, so buffers made now would stay empty."""
    if is_captured():
        raise UsageError(
            "the first step was called during the capture of a CUDA graph, so each replay would create its state again",
            where="step()",
            found="a stream that is captured, and no state of an earlier step",
            allowed="captures of later steps",
            fix="take a few steps before the capture, on a side stream, as torch.cuda.graph asks for anyway",
        )


def both(one: bool | Tensor, other: bool | Tensor) -> bool | Tensor:
    """Return whether both flags are set; on the first one's device if both are tensors."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        other = other.to(one.device)
    return one & other


def scale_on(scale: float | Tensor, device: torch.device) -> Tensor:
    """Return a loss scale as a float32 scalar on a device."""
    if isinstance(scale, Tensor):
        return scale.to(device)
    return torch.full((), scale, dtype=torch.float32, device=device)


def where(condition: Tensor, one: Any, other: Any) -> Tensor:
    """Return ``torch.where`` for `polyamp.advance`, with numbers cached on the device instead of sent each time."""
    if not isinstance(one, Tensor):
        one = constant(one, other.dtype, condition.device)
    if not isinstance(other, Tensor):
        other = constant(other, one.dtype, condition.device)
    return torch.where(condition, one, other)


def constant(number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a cached scalar on a device, which must not be changed."""
    # A scalar that is created while a CUDA graph is captured belongs to the graph: it has no value before the first
    # replay.
    key = number, dtype, device
    scalar = _constants.get(key)
    if scalar is None:
        scalar = torch.full((), number, dtype=dtype, device=device)  # a fill, not a copy that waits
        if not is_captured():
            _constants[key] = scalar
    return scalar


_constants: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}


class LateValues:
    """A queue for one small tensor, which is copied to the host without a sync on devices with streams (CUDA, XPU)."""

    def __init__(self) -> None:
        self.copy: Tensor | None = None  # on its way to the host
        self._arrival: Any = None

    def send(self, values: Callable[[], Tensor]) -> None:
        """Start the copy, unless an earlier one is still under way or a CUDA graph is captured."""
        # While a graph is captured the host does not read values.
        if self.copy is not None or is_captured():
            return
        sent = values()
        current_stream = _streams_of(sent.device)
        self.copy = sent.to("cpu", non_blocking=current_stream is not None)
        self._arrival = current_stream and current_stream(sent.device).record_event()

    def receive(self) -> list[Any] | None:
        """Return the values if they have arrived, and forget them; else return None."""
        if self.copy is None or is_captured():
            return None
        if self._arrival is not None and not self._arrival.query():
            return None
        values: list[Any] = self.copy.tolist()
        self.copy = self._arrival = None
        return values


def _streams_of(device: torch.device) -> Any:
    """Return the function that returns a device's current stream; None if the device has no streams."""
    return None if device.type == "cpu" else getattr(torch.get_device_module(device), "current_stream", None)
