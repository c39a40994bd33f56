"""What one optimizer step did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyamp.loss_scale import LossScaleState


class StepResult:
    """Whether a step was applied, and the loss scale after it. True where it was applied.

    Making one costs no host sync; looking at a property does, once. Inside a traced function (``jax.jit``,
    ``tf.function``) the properties are the traced values themselves.

    >>> from polyamp import LossScale, advance
    >>> config = LossScale()
    >>> result = StepResult(advance(config, config.initial_state(), False))
    >>> bool(result), result.scale, result.skipped_in_a_row, result.reason
    (False, 32768.0, 1, 'gradients were not finite')
    """

    __slots__ = ("_state",)

    def __init__(self, state: LossScaleState) -> None:
        self._state = state

    @property
    def applied(self) -> Any:
        """Whether parameters and optimizer state were updated; a bool."""
        return _look(self._state.skipped_in_a_row < 1, bool)  # `==` would compare objects in a TensorFlow 1 graph

    @property
    def scale(self) -> Any:
        """The loss scale after the step, which the next loss is multiplied by; a float."""
        return _look(self._state.scale, float)

    @property
    def skipped_in_a_row(self) -> Any:
        """Steps skipped since the last one that was applied; an int."""
        return _look(self._state.skipped_in_a_row, int)

    @property
    def reason(self) -> str:
        """Why the step was skipped; empty where it was applied."""
        return "" if self else "gradients were not finite"

    def __bool__(self) -> bool:
        return bool(self._state.skipped_in_a_row < 1)

    def __repr__(self) -> str:
        return f"StepResult(applied={self.applied}, scale={self.scale}, skipped_in_a_row={self.skipped_in_a_row})"


def _look(value: Any, convert: Callable[[Any], Any]) -> Any:
    try:
        return convert(value)
    except TypeError:  # a traced value has no number yet, and every framework says so with a TypeError
        return value
