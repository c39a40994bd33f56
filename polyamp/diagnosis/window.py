"""The safe range of loss scales."""

from __future__ import annotations

from typing import NamedTuple

from polyamp.layout import power


class Window(NamedTuple):
    """The safe range of loss scales, as powers of two: next to nothing is lost, and nothing overflows."""

    low: float  # at smaller scales, a gradient loses more of its L1 mass than is tolerated
    high: float  # at larger scales, a gradient comes too near to overflow; this includes the margin

    @property
    def is_empty(self) -> bool:
        """Return whether no scale suits all gradients."""
        return self.low > self.high

    def __contains__(self, scale: object) -> bool:
        return isinstance(scale, int | float) and self.low <= scale <= self.high

    def __repr__(self) -> str:
        return f"Window({self})"

    def __str__(self) -> str:
        return f"{power(self.low)} .. {power(self.high)}"
