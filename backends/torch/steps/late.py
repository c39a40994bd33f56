"""Values copied from a device to the host and read at a later step, so that no step waits for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.kernels.control import is_captured


class LateValues:
    """One small tensor at a time, copied without a sync on devices with streams (CUDA and XPU).

    >>> late = LateValues()
    >>> late.send(torch.tensor([1.0, 2.0]))
    >>> late.receive(), late.receive()
    ([1.0, 2.0], None)
    """

    def __init__(self) -> None:
        self._copy: Tensor | None = None
        self._arrival: Any = None

    @property
    def is_under_way(self) -> bool:
        """Whether values were sent and not yet received."""
        return self._copy is not None

    def send(self, values: Tensor) -> None:
        """Start the copy, unless an earlier one is still under way or a CUDA graph is captured.

        While a graph is captured the host does not read values.
        """
        if self.is_under_way or is_captured():
            return
        current_stream = _streams_of(values.device)
        self._copy = values.to("cpu", non_blocking=current_stream is not None)
        self._arrival = current_stream and current_stream(values.device).record_event()

    def receive(self) -> list[Any] | None:
        """Return the values, once, if they have arrived; else None."""
        if self._copy is None or is_captured():
            return None
        if self._arrival is not None and not self._arrival.query():
            return None
        values: list[Any] = self._copy.tolist()
        self._copy = self._arrival = None
        return values


def _streams_of(device: torch.device) -> Any:
    """Return the function for a device's current stream, whose events report arrivals; None without streams."""
    return None if device.type == "cpu" else getattr(torch.get_device_module(device), "current_stream", None)
