"""How the memory of a training step grows with the batch, and the largest batch that fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from polyamp.errors import InvalidValueError, is_integer, shown


class Pass(NamedTuple):
    """One forward and backward pass: how many numbers are trained, and its memory in bytes."""

    parameters: int
    saved: int  # kept for the backward pass
    in_use: Sequence[int]  # at every moment at which something was allocated


class Footprint(NamedTuple):
    """The memory of a pass over some examples, and of the same pass over twice as many.

    Every number is taken as ``fixed + examples * each``, for these two and for any other number of examples.
    """

    examples: int
    once: Pass
    twice: Pass

    @property
    def saved_each(self) -> int:
        """The bytes that each example keeps for the backward pass."""
        return (self.twice.saved - self.once.saved) // self.examples

    def largest_batch(self, memory: int, optimizer_bytes: float) -> int:
        """Return the largest batch that fits in so many bytes, 0 if none does."""
        # Which moment is the fullest depends on the batch: everything has to fit at each of them.
        free = memory - int(self.once.parameters * optimizer_bytes)
        moments = set(zip(self.once.in_use, self.twice.in_use, strict=True))
        return min(
            max(free - (2 * once - twice), 0) // max((twice - once) // self.examples, 1) for once, twice in moments
        )


def batch_axes(shapes: Sequence[Sequence[int]], examples: int) -> list[int | None]:
    """Return each shape's batch axis: the first of length ``examples``; None if it has no such axis."""
    if not is_integer(examples) or not any(examples in shape for shape in shapes):
        raise InvalidValueError(
            "no argument has an axis of so many examples",
            where="explain(fn, *args, examples=)",
            found=f"{shown(examples)}, and arguments of shapes {', '.join(map(str, map(tuple, shapes))) or 'none'}",
            allowed="the length of the batch axis of the arguments",
            fix="pass the number of examples that the arguments hold",
        )
    return [list(shape).index(examples) if examples in shape else None for shape in shapes]
