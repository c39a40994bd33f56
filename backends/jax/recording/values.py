"""The facts about arrays and equations of a step while it is evaluated."""

from __future__ import annotations

from typing import Any, NamedTuple

from polyamp.backends.jax import unstable
from polyamp.backends.jax.recording.counting import Sample
from polyamp.diagnosis.recording import Kind

_CHECKPOINTS = ("rematted_computation", "checkpoint")


class Origin(NamedTuple):
    """The operation that computed a tensor."""

    name: str
    native: str
    where: str
    op_class: str
    format: str
    number: int | None = None  # the unique number of its record; None if no record is of exactly this tensor


class Evaluated(NamedTuple):
    """An array while a step is evaluated."""

    array: Any  # its current value; a 16-bit value of a widened step is float32
    backward: bool = False  # whether the backward pass computed it
    scaled: bool = False  # whether the loss scale is a factor of it
    # the operation that computed it, before casts and moves; None for constants and inputs
    origin: Origin | None = None

    def elsewhere(self) -> Evaluated:
        """Return the same value after a loop or branch, whose records are not of exactly this array."""
        return self if self.origin is None else self._replace(origin=self.origin._replace(number=None))


class Record(NamedTuple):
    """A future observation, whose sample is not counted yet."""

    kind: Kind
    origin: Origin  # the other fields of the observation
    shape: tuple[int, ...]
    sample: Sample  # the sample of its elements
    scaled: bool = False  # whether the loss scale is a factor of it
    replaces: int | None = None  # number of the record of the same tensor that this one replaces
    named: bool = False  # for a parameter's gradient, whether the optimizer named it


class Place(NamedTuple):
    """The place of an equation."""

    path: str = ""  # named scopes, joined by ``/``
    differentiated: bool = False  # whether it belongs to the forward or backward pass of a derivative
    backward: bool = False  # whether it belongs to the backward pass
    again: bool = False  # whether it recomputes the forward pass, for ``jax.checkpoint``
    turns: int = 1  # number of iterations of the loops around it

    def of(self, equation: Any) -> Place:
        """Return the place of an equation in a program that is at this place."""
        names, steps = unstable.scopes(equation).split("/"), unstable.transformations(equation)
        return Place(
            "/".join(filter(None, (self.path, *(name for name in names if name not in _CHECKPOINTS)))),
            self.differentiated or not steps.isdisjoint(("jvp", "transpose")),
            self.backward or "transpose" in steps,
            self.again or _CHECKPOINTS[0] in names,
            self.turns,
        )

    def repeated(self, times: int) -> Place:
        """Return the same place, inside a loop."""
        return self._replace(turns=self.turns * times)
