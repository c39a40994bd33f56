"""What one optimizer step did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyamp.limits import NONFINITE_LOSS
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

    Args:
        state: the loss-scale state after the step.
        applied: whether this optimizer's step was applied, where others share its loss scale; a scalar as those of
            ``state``. None is whether the state says so.
        explain: more about a skipped step, for `reason`; called when somebody looks.
    """

    __slots__ = ("_applied", "_explain", "_state")

    def __init__(self, state: LossScaleState, applied: Any = None, explain: Callable[[], str] | None = None) -> None:
        self._state = state
        self._applied = applied
        self._explain = explain

    @property
    def flag(self) -> Any:
        """Whether the step was applied, as it is: a bool, or a scalar on the device. Costs no host sync.

        >>> from polyamp import LossScale
        >>> StepResult(LossScale().initial_state()).flag
        True
        """
        # `==` would compare objects in a TensorFlow 1 graph
        return self._state.skipped_in_a_row < 1 if self._applied is None else self._applied

    @property
    def applied(self) -> Any:
        """Whether parameters and optimizer state were updated; a bool."""
        return _look(self.flag, bool)

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
        if self:
            return ""
        more = self._explain() if self._explain else ""
        if more.startswith(NONFINITE_LOSS):
            return more
        return f"gradients were not finite: {more}" if more else "gradients were not finite"

    def __bool__(self) -> bool:
        return bool(self.flag)

    def __reduce__(self) -> tuple[Any, ...]:
        return StepResult, (self._state, self._applied)  # an explanation needs the gradients, which no copy has

    def __repr__(self) -> str:
        return f"StepResult(applied={self.applied}, scale={self.scale}, skipped_in_a_row={self.skipped_in_a_row})"


def _look(value: Any, convert: Callable[[Any], Any]) -> Any:
    try:
        return convert(value)
    except TypeError:  # a traced value has no number yet, and every framework says so with a TypeError
        return value
