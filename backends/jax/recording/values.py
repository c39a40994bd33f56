"""What is known of the arrays and the equations of a step while it is evaluated."""

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
        number: of its record, which no other one has; None where it has none that is of this very tensor.
    """

    name: str
    native: str
    where: str
    op_class: str
    format: str
    number: int | None = None


class Value(NamedTuple):
    """An array while a step is evaluated.

    Attributes:
        array: as it is now; a 16-bit value of a widened step is float32.
        backward: whether the backward pass computed it.
        scaled: whether the loss scale is a factor of it.
        origin: what computed it, before it was cast or moved; None for constants and inputs.
    """

    array: Any
    backward: bool = False
    scaled: bool = False
    origin: Origin | None = None

    def elsewhere(self) -> Value:
        """The same after a loop or a branch, whose records are of more, or less, than this array."""
        return self if self.origin is None else self._replace(origin=self.origin._replace(number=None))


class Record(NamedTuple):
    """What becomes an observation once its sample is counted.

    Attributes:
        kind, shape: as in `polyamp.diagnosis.recording.Observation`.
        origin: the rest of what that says.
        sample: of its elements.
        scaled: whether the loss scale is a factor of it.
        replaces: number of the record of the same tensor that this one stands for.
        named: of a parameter's gradient, whether the optimizer told its name.
    """

    kind: Kind
    origin: Origin
    shape: tuple[int, ...]
    sample: Sample
    scaled: bool = False
    replaces: int | None = None
    named: bool = False


class Place(NamedTuple):
    """Where an equation stands.

    Attributes:
        path: named scopes, joined by ``/``.
        differentiated: whether it is of the forward or the backward pass of a derivative.
        backward: whether it is of the backward pass.
        again: whether it computes once more what the forward pass did, for ``jax.checkpoint``.
        turns: how often the loops around it turn.
    """

    path: str = ""
    differentiated: bool = False
    backward: bool = False
    again: bool = False
    turns: int = 1

    def of(self, equation: Any) -> Place:
        """The place of an equation that stands here."""
        names, steps = unstable.scopes(equation).split("/"), unstable.transformations(equation)
        return Place(
            "/".join(filter(None, (self.path, *(name for name in names if name not in _CHECKPOINTS)))),
            self.differentiated or not steps.isdisjoint(("jvp", "transpose")),
            self.backward or "transpose" in steps,
            self.again or _CHECKPOINTS[0] in names,
            self.turns,
        )

    def repeated(self, times: int) -> Place:
        """The same in a loop."""
        return self._replace(turns=self.turns * times)
