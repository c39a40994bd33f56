"""StepResult: what it says, and that it is lazy."""

from functools import partial, reduce
from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp import LossScale, LossScaleState, StepResult, advance


def state(*finite: bool) -> LossScaleState:
    config = LossScale()
    return reduce(partial(advance, config), finite, config.initial_state())


def result(*finite: bool) -> StepResult:
    return StepResult(state(*finite))


@pytest.mark.parametrize(
    ("trace", "applied", "scale", "skips"),
    [
        ((True,), True, 2.0**16, 0),
        ((False,), False, 2.0**15, 1),
        ((False, False), False, 2.0**14, 2),
        ((False, True), True, 2.0**15, 0),
    ],
)
def test_says_what_happened(trace: tuple[bool, ...], applied: bool, scale: float, skips: int) -> None:
    made = result(*trace)
    assert (bool(made), made.applied, made.scale, made.skipped_in_a_row) == (applied, applied, scale, skips)
    assert made.reason == ("" if applied else "gradients were not finite")
    assert f"applied={applied}" in repr(made)
    assert made.was_skipped is not applied


def test_before_the_first_step_none_is_claimed() -> None:
    made = result()
    assert (bool(made), made.applied, made.was_skipped, made.reason) == (False, False, False, "no step was made yet")


@pytest.mark.parametrize("applied", [True, False])
def test_an_optimizer_that_shares_a_scale_has_a_result_of_its_own(applied: bool) -> None:
    made = StepResult(state(not applied), applied)
    assert (made.applied, made.flag, made.was_skipped) == (applied, applied, not applied)
    assert bool(made.reason) is not applied


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(polyamp.errors.InvalidTypeError, match="state"):
        StepResult(tuple(LossScale().initial_state()))  # type: ignore[arg-type]


def test_the_result_of_several_states_is_not_one_truth() -> None:
    several = state(True)._replace(skipped_in_a_row=np.array([0, 1]))
    assert StepResult(several).applied.tolist() == [True, False]
    with pytest.raises(polyamp.errors.UsageError, match="several states"):
        bool(StepResult(several))


class Watched(float):
    """A number that records when somebody looks."""

    looks = 0

    def __float__(self) -> float:
        Watched.looks += 1
        return 1.0


def test_nothing_is_read_before_somebody_looks() -> None:
    Watched.looks = 0
    made = StepResult(state()._replace(scale=Watched()))
    assert Watched.looks == 0
    assert made.scale == 1.0
    assert Watched.looks == 1


class Traced:
    """A value that refuses to be a number, as traced values of every framework do."""

    def __float__(self) -> float:
        raise TypeError("traced")


def test_traced_values_come_back_as_they_are() -> None:
    traced: Any = Traced()
    assert StepResult(state()._replace(scale=traced)).scale is traced
