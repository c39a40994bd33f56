"""The recording of one training step, every tensor in the order of computation, and how two recordings differ."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from polyamp.diagnosis.spread import Spread
from polyamp.formats import format_of

Kind = Literal["activation", "activation gradient", "parameter gradient"]

ACTIVATION: Kind = "activation"
GRADIENT: Kind = "activation gradient"
PARAMETER: Kind = "parameter gradient"


SHARE = 0.1
"""The share of its value by which a loss, or the L1 mass of a tensor, may differ from float32's.

One rounding to float16 changes a value by 0.05 %, to bfloat16 by 0.4 %, and the losses of ordinary networks by less
than a few percent. But where a difference of nearly equal values is rounded, nothing of it may remain.
"""


class Observation(NamedTuple):
    """One tensor of a step."""

    # "activation", computed by the forward pass; "activation gradient", computed by the backward pass; "parameter
    # gradient", passed to the optimizer
    kind: Kind
    # canonical name (`polyamp.operations`) of the operation that computed it, else the framework's name; for a
    # parameter gradient, the parameter's name
    name: str
    # scope or module path, joined by ``/``; empty if unknown. A gradient has the path of its forward operation
    where: str
    op_class: str  # class of the operation under the policy, as in a plan
    format: str  # the format in which the policy computes it
    shape: tuple[int, ...]  # the tensor's shape
    spread: Spread  # the spread of its elements; for a loop's body, over all iterations

    @property
    def place(self) -> str:
        """Return the operation with its path, as in a rule."""
        return f"{self.where}/{self.name}" if self.where and self.kind != PARAMETER else self.name

    @property
    def is_low(self) -> bool:
        """Return whether the policy computes this tensor in 16 bits."""
        return format_of(self.format).is_low

    @property
    def is_rounding(self) -> bool:
        """Return whether this is a float32 result that was rounded to 16 bits for the next operation."""
        return self.is_low and self.op_class == "full"

    @property
    def pattern(self) -> str:
        """Return the pattern for a rule about this operation at its path, with wildcard characters escaped."""
        *_, named = re.split(r"[./]{2,}|^[./]", self.place)  # after the last blank component: patterns have none
        return re.sub(r"([*?[])", r"[\1]", named)

    def as_dict(self) -> dict[str, Any]:
        """Return the observation as JSON values."""
        return {**self._asdict(), "shape": list(self.shape), "spread": self.spread.as_dict()}


@dataclass(frozen=True)
class Recording:
    """One step, as recorded by an adapter."""

    framework: str  # the adapter's name
    policy: str  # the policy's text
    loss: float | None  # the unscaled loss; None if the step does not show one
    scale: float  # the factor of the loss when it was differentiated
    # in the order of computation: the forward pass, then the backward pass. Gradients are as computed, times ``scale``
    observations: tuple[Observation, ...]
    # whether the step itself computed the gradients and chose the scale; else the recorder did
    differentiates: bool = False

    def of_kind(self, *kinds: Kind) -> Iterator[Observation]:
        """Return the observations of these kinds, in order."""
        return (one for one in self.observations if one.kind in kinds)

    def unscaled(self) -> Recording:
        """Return the same recording with unscaled gradients."""
        if self.scale == 1:
            return self
        exponent = round(math.log2(self.scale))  # normally a power of two
        divided = (
            one if one.kind == ACTIVATION else one._replace(spread=one.spread.scaled(-exponent))
            for one in self.observations
        )
        return replace(self, scale=1.0, observations=tuple(divided))

    def by_layer(self) -> Recording:
        """Return the same recording with one observation for all calls of a layer, as in a recurrence that is a loop.

        Tensors of the same kind, format and shape from one operation at one path are merged. Their gradients add up in
        the same parameters, so what one call loses counts by its share of all calls. Without a path, layers cannot be
        told apart, and nothing is merged.
        """
        found: dict[Hashable, Observation] = {}
        for turn, one in enumerate(self.observations):
            key = (one.kind, one.place, one.format, one.shape, None if one.where else turn)
            known = found.get(key)
            found[key] = one if known is None else known._replace(spread=known.spread.merged(one.spread))
        return replace(self, observations=tuple(found.values()))

    @cached_property
    def broken(self) -> Observation | None:
        """Return the first tensor that is not finite; None if only masks, which hold -inf, are not finite."""
        bad = [one for one in self.observations if not one.spread.is_finite]
        is_mask = all(one.kind == ACTIVATION and not one.spread.nan for one in bad)
        is_fine = is_mask and (self.loss is None or math.isfinite(self.loss))
        return None if is_fine else next(iter(bad), None)

    @property
    def is_forward_sound(self) -> bool:
        """Return whether the loss is finite; for a step that shows no loss, whether its whole forward pass is."""
        seen = [one.spread for one in self.of_kind(ACTIVATION)]
        if self.loss is None:
            return all(spread.is_finite for spread in seen)
        return math.isfinite(self.loss) and not any(spread.nan for spread in seen)

    @cached_property
    def numbered(self) -> dict[tuple[Kind, str, int], Observation]:
        """Return the observations by kind, place, and the number of earlier ones of that kind at that place."""
        seen, found = Counter[tuple[Kind, str]](), dict[tuple[Kind, str, int], Observation]()
        for one in self.observations:
            found[one.kind, one.place, seen[one.kind, one.place]] = one
            seen[one.kind, one.place] += 1
        return found

    @property
    def names(self) -> list[str]:
        """Return the place of each observation, numbered if several of a kind share it: ``cell/matmul[3]``."""
        several = Counter((kind, place) for kind, place, _ in self.numbered)
        return [f"{place}[{turn}]" if several[kind, place] > 1 else place for kind, place, turn in self.numbered]


class Rounding(NamedTuple):
    """A loss or gradient that 16 bits change, and the first tensor that changes."""

    loss: float  # the loss under the policy
    loss_float32: float  # the loss in float32
    # from the run under the policy: the first tensor of the forward pass, with more than one element, that differs; or
    # if the loss agrees, the parameter gradient that differs most
    first: Observation
    mass: float  # the sum of its magnitudes
    mass_float32: float  # the same in float32

    def as_dict(self) -> dict[str, Any]:
        """Return the rounding as JSON values."""
        return {**self._asdict(), "first": self.first.place}

    def __str__(self) -> str:
        change = "nothing is left of" if not self.mass else f"{self.mass:.3g} in place of {self.mass_float32:.3g} is"
        which = f"the first tensor that differs by more than {SHARE:.0%}"
        if self.first.kind == PARAMETER:
            which = "the gradient that differs most"
        return (
            f"the loss is {self.loss:.6g}, and {self.loss_float32:.6g} in float32; {which} is {self.first.place}: "
            f"{change} the sum of its magnitudes"
        )


def rounding(narrow: Recording, wide: Recording, *, gradients: bool) -> Rounding | None:
    """Compare a step under the policy with the same step in float32, both unscaled; None if the values agree.

    ``gradients``: compare gradients too, since the step had a loss scale that suits them.
    """
    if narrow.loss is None or wide.loss is None:
        return None
    found = {}
    for key, one in narrow.numbered.items():
        other = wide.numbered.get(key)
        if other is not None and one.spread.is_finite and other.spread.is_finite:
            found[key] = Rounding(narrow.loss, wide.loss, one, math.fsum(one.spread.mass), math.fsum(other.spread.mass))
    if _differ(narrow.loss, wide.loss):
        forward = (one for one in found.values() if one.first.kind == ACTIVATION and one.first.spread.elements > 1)
        return next((one for one in forward if _differ(one.mass, one.mass_float32)), None)
    backward = [one for one in found.values() if gradients and one.first.kind == PARAMETER]
    off = sum(abs(one.mass - one.mass_float32) for one in backward)
    if off > SHARE * sum(one.mass_float32 for one in backward):
        return max(backward, key=lambda one: abs(one.mass - one.mass_float32))
    return None


def _differ(one: float, other: float) -> bool:
    """Return whether two finite numbers differ by more than `SHARE` of the larger one."""
    if not (math.isfinite(one) and math.isfinite(other)):
        return False
    return abs(one - other) > SHARE * max(abs(one), abs(other))
