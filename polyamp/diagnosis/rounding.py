"""The effect of rounding: whether 16 bits change the values of a step although every tensor stays in range."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from polyamp.diagnosis.recording import ACTIVATION, Observation, Recording

SHARE = 0.1
"""The share of its value by which a loss, or the L1 mass of a tensor, may differ from float32's.

One rounding to float16 changes a value by 0.05 %, to bfloat16 by 0.4 %, and the losses of ordinary networks by less
than a few percent. But where a difference of nearly equal values is rounded, nothing of it may remain.
"""


class Rounding(NamedTuple):
    """A loss that 16 bits change, and the tensor where that starts."""

    loss: float  # the loss under the policy
    loss_float32: float  # the loss in float32
    # the first tensor of the forward pass, with more than one element, that differs; from the run under the policy
    first: Observation
    mass: float  # the sum of its magnitudes
    mass_float32: float  # the same in float32

    def as_dict(self) -> dict[str, Any]:
        """Return the rounding as JSON values."""
        return {**self._asdict(), "first": self.first.place}

    def __str__(self) -> str:
        change = "nothing is left of" if not self.mass else f"{self.mass:.3g} in place of {self.mass_float32:.3g} is"
        return (
            f"the loss is {self.loss:.6g}, and {self.loss_float32:.6g} in float32; the first tensor that differs by "
            f"more than {SHARE:.0%} is {self.first.place}: {change} the sum of its magnitudes"
        )


def rounding(narrow: Recording, wide: Recording) -> Rounding | None:
    """Compare a step under the policy with the same step in float32; None if the values agree."""
    if narrow.loss is None or wide.loss is None or not differ(narrow.loss, wide.loss):
        return None
    for key, one in narrow.numbered.items():
        other = wide.numbered.get(key)
        if one.kind == ACTIVATION and one.spread.elements > 1 and other is not None:
            mass, mass_float32 = math.fsum(one.spread.mass), math.fsum(other.spread.mass)
            if one.spread.is_finite and other.spread.is_finite and differ(mass, mass_float32):
                return Rounding(narrow.loss, wide.loss, one, mass, mass_float32)
    return None


def differ(one: float, other: float) -> bool:
    """Return whether two finite numbers differ by more than `SHARE` of the larger one."""
    if not (math.isfinite(one) and math.isfinite(other)):
        return False
    return abs(one - other) > SHARE * max(abs(one), abs(other))
