"""The facts about arrays and equations of a step while it is evaluated."""

from __future__ import annotations

from typing import Any, NamedTuple

from polyamp.backends.jax import unstable
from polyamp.backends.jax.recording.counting import Sample
from polyamp.diagnosis.recording import Kind

_CHECKPOINTS = ("rematted_computation", "checkpoint")


class Origin(NamedTuple):
    """The operation that computed a tensor.

    Attributes:
        name, native, where, op_class, format: as in `polyamp.diagnosis.recording.Observation`.
        number: the unique number of its record; None if no record is of exactly this tensor.
    """

    name: str
    native: str
    where: str
    op_class: str
    format: str
    number: int | None = None


class Evaluated(NamedTuple):
    """An array while a step is evaluated.

    Attributes:
        array: its current value; a 16-bit value of a widened step is float32.
        backward: whether the backward pass computed it.
        scaled: whether the loss scale is a factor of it.
        origin: the operation that computed it, before casts and moves; None for constants and inputs.
    """

    array: Any
    backward: bool = False
    scaled: bool = False
    origin: Origin | None = None

    def elsewhere(self) -> Evaluated:
        """Return the same value after a loop or branch, whose records are not of exactly this array."""
        return self if self.origin is None else self._replace(origin=self.origin._replace(number=None))


class Record(NamedTuple):
    """A future observation, whose sample is not counted yet.

    Attributes:
        kind, shape: as in `polyamp.diagnosis.recording.Observation`.
        origin: the other fields of the observation.
        sample: the sample of its elements.
        scaled: whether the loss scale is a factor of it.
        replaces: number of the record of the same tensor that this one replaces.
        named: for a parameter's gradient, whether the optimizer named it.
    """

    kind: Kind
    origin: Origin
    shape: tuple[int, ...]
    sample: Sample
    scaled: bool = False
    replaces: int | None = None
    named: bool = False


class Place(NamedTuple):
    """The place of an equation.

    Attributes:
        path: named scopes, joined by ``/``.
        differentiated: whether it belongs to the forward or backward pass of a derivative.
        backward: whether it belongs to the backward pass.
        again: whether it recomputes the forward pass, for ``jax.checkpoint``.
        turns: number of iterations of the loops around it.
    """

    path: str = ""
    differentiated: bool = False
    backward: bool = False
    again: bool = False
    turns: int = 1

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
