"""Negative controls are chosen by what a policy computes in, and are in effect inside their block only."""

from __future__ import annotations

import threading

import pytest

from polyamp.controls import Control, active, broken, for_policy, imposed
from polyamp.loss_scale import LossScale

UNSCALED = Control("no loss scaling", LossScale.fixed(1))
ROUNDED = Control("16-bit updates", update_format="float16")


@pytest.mark.parametrize(
    ("policy", "controls"),
    [
        ("mixed_float16", (UNSCALED, ROUNDED)),
        ("O2", (UNSCALED, ROUNDED)),
        ("mixed_bfloat16", (Control("16-bit updates", update_format="bfloat16"),)),
        ("float32", ()),
        ("compute=tensorfloat32", ()),
    ],
)
def test_controls_are_those_that_should_make_a_policy_worse(policy: str, controls: tuple[Control, ...]) -> None:
    assert for_policy(policy) == controls


def test_nothing_is_imposed_outside_a_block() -> None:
    given = LossScale(init=8.0)
    assert active() is None
    assert imposed(given) == (given, None)


@pytest.mark.parametrize(
    ("control", "found"), [(UNSCALED, (LossScale.fixed(1), None)), (ROUNDED, (LossScale(), "float16"))]
)
def test_a_control_is_imposed_and_counted_in_its_block(control: Control, found: tuple[LossScale, str | None]) -> None:
    with broken(control) as tally:
        assert active() is control
        assert tally.reached == 0
        assert imposed(LossScale()) == imposed(LossScale()) == found
    assert tally.reached == 2
    assert active() is None


def test_a_control_does_not_reach_what_cannot_round() -> None:
    with broken(ROUNDED) as tally:
        assert imposed(LossScale(), rounds=False) == (LossScale(), None)
    with broken(UNSCALED) as other:
        assert imposed(LossScale(), rounds=False) == (LossScale.fixed(1), None)
    assert (tally.reached, other.reached) == (0, 1)


def test_the_innermost_block_is_in_effect_and_an_error_ends_it() -> None:
    with broken(UNSCALED) as outer:
        with pytest.raises(ZeroDivisionError), broken(ROUNDED):
            raise ZeroDivisionError
        assert active() is UNSCALED
        with broken(ROUNDED) as inner:
            imposed(LossScale())
    assert (outer.reached, inner.reached, active()) == (0, 1, None)


def test_another_thread_does_not_see_the_block() -> None:
    seen = []
    with broken(UNSCALED):
        thread = threading.Thread(target=lambda: seen.append(active()))
        thread.start()
        thread.join()
    assert seen == [None]
