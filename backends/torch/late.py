"""Values on their way from a device to the host, read at a later step so that no step waits for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LateValues:
    """One small tensor at a time, copied without a sync.

    >>> late = LateValues()
    >>> late.send(torch.tensor([1.0, 2.0])); late.receive(), late.receive()
    ([1.0, 2.0], None)
    """

    def __init__(self) -> None:
        self._copy: Tensor | None = None
        self._arrival: Any = None

    def send(self, values: Tensor) -> None:
        """Start the copy, unless an earlier one is still under way."""
        if self._copy is not None:
            return
        self._copy = values.to("cpu", non_blocking=True)
        if values.device.type != "cpu":
            stream = torch.get_device_module(values.device).current_stream(values.device)
            self._arrival = stream.record_event()

    def receive(self) -> list[float] | None:
        """The values, once, if they have arrived; else None."""
        if self._copy is None or not (self._arrival is None or self._arrival.query()):
            return None
        values, self._copy, self._arrival = self._copy.tolist(), None, None
        return values  # type: ignore[no-any-return]
