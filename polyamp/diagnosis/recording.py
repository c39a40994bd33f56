"""What an adapter records of one training step: every tensor's spread, in the order in which they were computed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from polyamp.diagnosis.spread import Spread
from polyamp.formats import format_of

Kind = Literal["activation", "activation gradient", "parameter gradient"]

ACTIVATION: Kind = "activation"
GRADIENT: Kind = "activation gradient"
PARAMETER: Kind = "parameter gradient"


class Observation(NamedTuple):
    """One tensor of a step.

    Attributes:
        kind: "activation", what the forward pass computed; "activation gradient", what the backward pass did;
            "parameter gradient", what the optimizer gets.
        name: canonical operation (`polyamp.operations`) that computed it, the framework's name where there is none; of
            a parameter gradient, the parameter's name.
        native: the framework's name of that operation.
        where: scope or module path, joined by ``/``; empty where it is not known. A gradient's is that of its forward
            operation.
        op_class: class of the operation under the policy, as in a plan.
        format: the format that the policy computes it in.
        shape: of the tensor.
        spread: of its elements. Of a loop's body, over all turns.
    """

    kind: Kind
    name: str
    native: str
    where: str
    op_class: str
    format: str
    shape: tuple[int, ...]
    spread: Spread

    @property
    def place(self) -> str:
        """The operation with its path, as a rule names it.

        >>> Observation("activation", "exp", "exp", "decoder/0", "full", "float32", (), Spread.of([])).place
        'decoder/0/exp'
        """
        return f"{self.where}/{self.name}" if self.where and self.kind != PARAMETER else self.name

    @property
    def is_low(self) -> bool:
        """Whether the policy computes it in 16 bits."""
        return format_of(self.format).is_low

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {**self._asdict(), "shape": list(self.shape), "spread": self.spread.as_dict()}


@dataclass(frozen=True)
class Recording:
    """One step, as an adapter saw it.

    Attributes:
        framework: the adapter's name.
        policy: the policy's text.
        loss: the unscaled loss; None where the step did not show one.
        scale: what the loss was multiplied by before it was differentiated.
        widened: whether 16-bit values were computed in float32, so that nothing overflowed or was lost; else as the
            policy has them.
        observations: in the order of computation: the forward pass, then the backward pass. Gradients are as they were
            computed, times ``scale``.
        differentiates: whether the step took the gradients itself, and chose the scale; else the recorder did.
    """

    framework: str
    policy: str
    loss: float | None
    scale: float
    widened: bool
    observations: tuple[Observation, ...]
    differentiates: bool = False

    def of_kind(self, *kinds: Kind) -> Iterator[Observation]:
        """The observations of these kinds, in order."""
        return (one for one in self.observations if one.kind in kinds)

    def unscaled(self) -> Recording:
        """The same with gradients of the loss itself.

        >>> recording = Recording("torch", "mixed_float16", None, 1.0, True, ())
        >>> recording.unscaled() == recording
        True
        """
        if self.scale == 1:
            return self
        exponent = _exponent(self.scale)
        divided = (
            one if one.kind == ACTIVATION else one._replace(spread=one.spread.scaled(-exponent))
            for one in self.observations
        )
        return replace(self, scale=1.0, observations=tuple(divided))

    def by_layer(self) -> Recording:
        """The same with one observation for all calls of a layer, as the turns of a recurrence written as a loop.

        That is: for like tensors of one operation at one path. Their gradients add up in the same parameters, so what
        is lost of one turn counts by its share in all of them. Without a path nothing tells layers apart, and nothing
        is merged.
        """
        found: dict[Hashable, Observation] = {}
        for turn, one in enumerate(self.observations):
            key = (one.kind, one.place, one.format, one.shape, None if one.where else turn)
            known = found.get(key)
            found[key] = one if known is None else known._replace(spread=known.spread.merged(one.spread))
        return replace(self, observations=tuple(found.values()))

    @property
    def names(self) -> list[str]:
        """The place of each observation, numbered where several of a kind stand there: ``cell/matmul[3]``."""
        kinds = [(one.kind, one.place) for one in self.observations]
        several, seen = Counter(kinds), Counter[tuple[str, str]]()
        names = []
        for kind, place in kinds:
            names.append(f"{place}[{seen[kind, place]}]" if several[kind, place] > 1 else place)
            seen[kind, place] += 1
        return names


def _exponent(scale: float) -> int:
    """A loss scale is a power of two wherever its settings are; of another one, the nearest."""
    return round(math.log2(scale))
