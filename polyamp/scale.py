"""The one loss-scale rule: the pure function that advances the scale, and the result of a step.

Gradients in float16 below 2**-25 round to zero. Multiplying the loss by a scale moves them up; dividing them before the
update restores them. A *dynamic* scale grows while gradients stay finite. When a gradient overflows, the scale backs
off and that step is skipped (Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2).

For example, with the defaults the scale starts at 2**16 and doubles after 2 000 finite steps; at the next overflow the
step is skipped and the scale is halved.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from polyamp.errors import InvalidTypeError, UsageError, check_arguments, wrong_type
from polyamp.formats import in_single
from polyamp.libraries import LARGEST_COUNT
from polyamp.settings import TYPES, LossScale, LossScaleState
from polyamp.skips import reason_of


def _choose(condition: Any, if_true: Any, if_false: Any) -> Any:
    return if_true if condition else if_false


def advance(
    config: LossScale,
    state: LossScaleState,
    finite: Any,
    where: Callable[[Any, Any, Any], Any] = _choose,
) -> LossScaleState:
    """Return the state after one step, by the loss-scale rule.

    Every adapter calls this; only PyTorch's kernels have the same rule compiled, in ``csrc/update_rules.h``.

    It is pure and uses only arithmetic, comparison, ``&``, ``|`` and ``where``. So the same code runs on Python
    numbers, on tensors of any framework without a host sync, inside ``jax.jit`` and inside ``tf.function``.

    >>> config = LossScale(hysteresis=2)
    >>> once = advance(config, config.initial_state(), False)
    >>> once.scale, advance(config, once, False).scale
    (65536.0, 32768.0)

    Args:
        config: the settings.
        state: the state before the step; see `LossScaleState`.
        finite: scalar boolean: whether all gradients of this step are finite.
        where: the framework's three-argument select, such as ``torch.where``.

    Returns:
        The new state; each field keeps its type. A scale outside the limits starts again at ``init``, and counters stay
        at 2**31 - 1.
    """
    if not (type(config) is LossScale and type(state) is LossScaleState and callable(where)):
        checks = [
            ("config", config, type(config) is LossScale, "a LossScale"),
            ("state", state, type(state) is LossScaleState, "a LossScaleState, such as config.initial_state()"),
            ("where", where, callable(where), "a select, such as torch.where"),
        ]
        check_arguments("advance", checks, InvalidTypeError)
    if where is _choose and type(finite) is not bool:
        try:
            finite = bool(finite)
        except Exception as error:
            fix = "pass a flag, and for a framework's scalars its where, such as torch.where"
            raise wrong_type(finite, where="advance(finite)", allowed="a scalar boolean", fix=fix) from error
    if not config.check:
        return state
    is_whole = where is _choose and config.min <= state.scale <= config.max and state.steps < LARGEST_COUNT
    if is_whole and finite is True:  # the common case on the host: only counts change
        good, hysteresis = state.good_steps + 1, config.hysteresis if config.consecutive else state.hysteresis
        if good < config.interval and hysteresis > 0:
            return state._replace(good_steps=good, hysteresis=hysteresis, skipped_in_a_row=0, steps=state.steps + 1)

    def select(condition: Any, one: Any, other: Any) -> Any:  # some fields of a state may be Python numbers
        return (_choose if isinstance(condition, bool) else where)(condition, one, other)

    def more(count: Any) -> Any:
        return select(count < LARGEST_COUNT, count + 1, count)

    # A file or the user's code can have left any scale; comparisons with NaN are false.
    scale = select((state.scale >= config.min) & (state.scale <= config.max), state.scale, config.init)
    good = where(finite, more(state.good_steps), config._restart)
    grow = good >= config.interval  # never true after an overflow: _restart <= 0 < interval
    refilled = where(finite, config.hysteresis if config.consecutive else state.hysteresis, state.hysteresis - 1)
    spent, spent_at_min = where(refilled > 0, refilled, 0), where(refilled > 0, refilled, -1)
    hysteresis = where(grow, config.hysteresis, where(scale > config.min, spent, spent_at_min))
    grown, reduced = in_single(scale * config.growth), in_single(scale * config.backoff)
    grown = where(grown > config.max, config.max, grown)
    reduced = where(reduced < config.min, config.min, reduced)
    rose, steps = grow & (grown > scale), more(state.steps)  # the scale cannot rise above its maximum
    return LossScaleState(
        scale=where(finite, where(grow, grown, scale), where(hysteresis > 0, scale, reduced)),
        good_steps=where(grow, -1 if config.late_growth == "always" else 0, good),
        hysteresis=hysteresis,
        skipped_in_a_row=where(finite, 0, more(state.skipped_in_a_row)),
        skipped=where(finite, state.skipped, more(state.skipped)),
        steps=steps,
        growths=where(rose, more(state.growths), state.growths),
        calibrating=where(finite | (state.growths > 0), state.calibrating, more(state.calibrating)),
        grown_at=where(rose, steps, state.grown_at),
        overflow_scale=where(finite, state.overflow_scale, scale),
    )


def can_divide(scale: Any) -> Any:
    """Return whether gradients can be unscaled by a scale: scalar boolean. A step with any other scale is skipped.

    >>> [can_divide(scale) for scale in (1.0, 0.0, -8.0, math.inf, math.nan)]
    [True, False, False, False, False]
    """
    return (scale > 0) & (scale < math.inf)


def on_host(state: LossScaleState) -> LossScaleState:
    """Return the same state as Python numbers, with one device-to-host copy per field that is on a device."""
    if type(state.scale) is float:
        return state
    return LossScaleState(*(kind(value) for kind, value in zip(TYPES, state, strict=True)))


# --- the result of a step ---------------------------------------------------------------------------------------------


class StepResult:
    """A step's result: whether it was applied, and the loss scale after it. It is true if the step was applied.

    Before the first step it is false, and `reason` tells this.

    Creating a result costs no host sync; the first access to a property does. Inside a traced function (``jax.jit``,
    ``tf.function``) the properties are the traced values themselves.

    >>> from polyamp import LossScale, advance
    >>> config = LossScale()
    >>> result = StepResult(advance(config, config.initial_state(), False))
    >>> bool(result), result.scale, result.skipped_in_a_row, result.reason
    (False, 32768.0, 1, 'gradients were not finite')
    >>> bool(StepResult(config.initial_state())), StepResult(config.initial_state()).reason
    (False, 'no step was made yet')

    Args:
        state: the loss-scale state after the step.
        applied: whether this optimizer's step was applied, if other optimizers share its loss scale; a scalar like
            those of ``state``. None takes the answer from the state.
        explain: returns more about a skipped step, for `reason`; called on access.
    """

    __slots__ = ("_applied", "_explain", "_state")

    def __init__(self, state: LossScaleState, applied: Any = None, explain: Callable[[], str] | None = None) -> None:
        if type(state) is not LossScaleState:
            checks = [("state", state, False, "a LossScaleState")]
            check_arguments("StepResult", checks, InvalidTypeError)
        self._state = state
        self._applied = applied
        self._explain = explain

    @property
    def flag(self) -> Any:
        """Whether the step was applied, without a host sync: a bool, or a scalar on the device.

        >>> from polyamp import LossScale
        >>> StepResult(LossScale().initial_state()).flag
        False
        """
        if self._applied is not None:
            return self._applied
        # `< 1`, since `== 0` would compare objects in a TensorFlow 1 graph
        return (self._state.skipped_in_a_row < 1) & (self._state.steps > 0)

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
        if not self.was_skipped:
            return "no step was made yet"
        return reason_of(self._explain() if self._explain else "")

    @property
    def was_skipped(self) -> bool:
        """Whether there was a step, and it was skipped; a bool. Waits for the device."""
        return not self and (self._applied is not None or bool(self._state.skipped_in_a_row > 0))

    def __bool__(self) -> bool:
        try:
            return bool(self.flag)
        except ValueError as error:
            raise UsageError(
                "this is the last step of several states",
                where="bool(last_step)",
                found=f"applied={self.flag}",
                allowed="one state",
                fix="look at .applied, or pass one member: jax.tree.map(lambda leaf: leaf[0], opt_state)",
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return StepResult, (self._state, self._applied)  # not `explain`: a copy does not have the gradients

    def __repr__(self) -> str:
        return f"StepResult(applied={self.applied}, scale={self.scale}, skipped_in_a_row={self.skipped_in_a_row})"


def _look(value: Any, convert: Callable[[Any], Any]) -> Any:
    try:
        return convert(value)
    except (TypeError, ValueError):  # a traced value has no number yet, and an ensemble of states has several
        return value
