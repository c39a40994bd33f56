"""How the memory of a training step grows with the batch, and the largest batch that fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from polyamp.errors import InvalidValueError, is_integer, shown


class Pass(NamedTuple):
    """One forward and backward pass, in bytes."""

    saved: int  # kept for the backward pass
    in_use: Sequence[int]  # at every moment at which something was allocated


class Growth(NamedTuple):
    """Bytes that grow with the batch: ``fixed + examples * each``."""

    fixed: int
    each: int


class Footprint(NamedTuple):
    """The memory of a forward and backward pass, as it grows with the batch."""

    examples: int  # in the arguments that were given
    parameters: int  # how many numbers are trained
    saved: Growth
    in_use: tuple[Growth, ...]  # at each moment; which one is the fullest depends on the batch

    def largest_batch(self, memory: int, optimizer_bytes: float) -> int:
        """Return the largest batch that fits in so many bytes, 0 if none does."""
        free = memory - int(self.parameters * optimizer_bytes)
        return min(max(free - moment.fixed, 0) // max(moment.each, 1) for moment in self.in_use)


def footprint(examples: int, parameters: int, once: Pass, twice: Pass) -> Footprint | None:
    """Return the growth between two passes, the second with twice the examples; None if they differ in more."""
    if len(once.in_use) != len(twice.in_use):
        return None
    moments = [_growth(examples, *pair) for pair in zip(once.in_use, twice.in_use, strict=True)]
    return Footprint(examples, parameters, _growth(examples, once.saved, twice.saved), tuple(dict.fromkeys(moments)))


def _growth(examples: int, once: int, twice: int) -> Growth:
    return Growth(2 * once - twice, (twice - once) // examples)


def batch_axes(shapes: Sequence[Sequence[int]], examples: int) -> list[int | None]:
    """Return the batch axis of each shape, the first one of this length; None for a shape without one."""
    if not is_integer(examples) or not any(examples in shape for shape in shapes):
        raise InvalidValueError(
            "no argument has an axis of so many examples",
            where="explain(fn, *args, examples=)",
            found=f"{shown(examples)}, and arguments of shapes {', '.join(map(str, map(tuple, shapes))) or 'none'}",
            allowed="the length of the batch axis of the arguments",
            fix="pass the number of examples that the arguments hold",
        )
    return [list(shape).index(examples) if examples in shape else None for shape in shapes]
