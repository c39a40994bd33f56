"""The frames in which autograd's nodes were recorded.

Checkpointing drops what a function computes and runs it again in the backward pass, which may be outside of the region
and in another thread. PyTorch restores native autocast's state for that run, but not polyamp's. Each autograd node has
a number that grows in the thread that recorded it, and the running node's number is known; so a thread notes from which
number on it was in which frame:

>>> history = History()
>>> history.add(0, None)
>>> history.add(10, "region")
>>> history.add(20, None)
>>> history.frame_at(5), history.frame_at(15), history.frame_at(25)
(None, 'region', None)
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

_LONGEST = 1 << 16


class History:
    """The frames of one thread, each with the number of the first autograd node that it may have recorded."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._frames: list[Any] = []

    def add(self, number: int, frame: Any) -> None:
        """Note that nodes are recorded in a frame from this number on; None is outside of regions."""
        if self._numbers and self._numbers[-1] == number:
            self._frames[-1] = frame
            return
        if len(self._numbers) == _LONGEST:
            del self._numbers[: _LONGEST // 2], self._frames[: _LONGEST // 2]
        self._numbers.append(number)
        self._frames.append(frame)

    def frame_at(self, number: int) -> Any:
        """Return the frame in which the node with a number was recorded; None outside of regions, or if not known."""
        index = bisect_right(self._numbers, number) - 1
        return self._frames[index] if index >= 0 else None
