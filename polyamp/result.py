"""The result of one optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyamp.loss_scale import LossScaleState
from polyamp.refusals import NONFINITE_LOSS


class StepResult:
    """A step's result: whether it was applied, and the loss scale after it. It is true if the step was applied.

    Creating a result costs no host sync; the first access to a property does. Inside a traced function (``jax.jit``,
    ``tf.function``) the properties are the traced values themselves.

    >>> from polyamp import LossScale, advance
    >>> config = LossScale()
    >>> result = StepResult(advance(config, config.initial_state(), False))
    >>> bool(result), result.scale, result.skipped_in_a_row, result.reason
    (False, 32768.0, 1, 'gradients were not finite')

    Args:
        state: the loss-scale state after the step.
        applied: whether this optimizer's step was applied, if other optimizers share its loss scale; a scalar like
            those of ``state``. None takes the answer from the state.
        explain: returns more about a skipped step, for `reason`; called on access.
    """

    __slots__ = ("_applied", "_explain", "_state")

    def __init__(self, state: LossScaleState, applied: Any = None, explain: Callable[[], str] | None = None) -> None:
        self._state = state
        self._applied = applied
        self._explain = explain

    @property
    def flag(self) -> Any:
        """Whether the step was applied, without a host sync: a bool, or a scalar on the device.

        >>> from polyamp import LossScale
        >>> StepResult(LossScale().initial_state()).flag
        True
        """
        # `< 1`, since `== 0` would compare objects in a TensorFlow 1 graph
        return self._state.skipped_in_a_row < 1 if self._applied is None else self._applied

    @property
    def applied(self) -> Any:
        """Whether parameters and optimizer state were updated; a bool."""
        return _look(self.flag, bool)

    @property
    def scale(self) -> Any:
        """The loss scale after the step, for the next loss; a float."""
        return _look(self._state.scale, float)

    @property
    def skipped_in_a_row(self) -> Any:
        """The number of steps skipped since the last applied one; an int."""
        return _look(self._state.skipped_in_a_row, int)

    @property
    def reason(self) -> str:
        """The reason why the step was skipped; empty if it was applied."""
        if self:
            return ""
        more = self._explain() if self._explain else ""
        if more.startswith(NONFINITE_LOSS):
            return more
        return f"gradients were not finite: {more}" if more else "gradients were not finite"

    def __bool__(self) -> bool:
        return bool(self.flag)

    def __reduce__(self) -> tuple[Any, ...]:
        return StepResult, (
            self._state,
            self._applied,
        )  # no explanation: a copy does not have the gradients

    def __repr__(self) -> str:
        return f"StepResult(applied={self.applied}, scale={self.scale}, skipped_in_a_row={self.skipped_in_a_row})"


def _look(value: Any, convert: Callable[[Any], Any]) -> Any:
    try:
        return convert(value)
    except TypeError:  # every framework raises TypeError for a traced value, which has no number yet
        return value
