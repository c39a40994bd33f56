"""The reports of a loss scale that is at its minimum, and of too many skipped steps in a row."""

from __future__ import annotations

from typing import Any

import pytest

import polyamp
from polyamp import LossScale
from polyamp.scale import report_limits
from support.loss_scale_cases import read, walk


def report(config: LossScale, trace: str) -> None:
    """Report after every step, as an adapter does."""
    for state in walk(config, read(trace)):
        report_limits(config, state)


NARROW = {"init": 4.0, "min": 2.0, "interval": 3}


def test_an_overflow_at_the_minimum_warns_once() -> None:
    with pytest.warns(polyamp.PolyampWarning, match="at its minimum, 2,") as caught:
        report(LossScale(**NARROW), "!!!!.!!")
    assert len(caught) == 1


def test_an_overflow_at_the_minimum_raises_if_asked_to() -> None:
    with pytest.raises(polyamp.errors.LossScaleError, match=r"(?s)minimum.*min = 2") as caught:
        report(LossScale(**NARROW, on_min="raise"), "!!")
    assert isinstance(caught.value, FloatingPointError)


@pytest.mark.parametrize(
    ("settings", "trace"),
    [
        ({"on_min": "ignore"}, "!!!!!!"),
        ({"on_min": "raise"}, "!..."),  # comes down to the minimum, where nothing overflows
        ({"on_min": "raise", "interval": 1}, "!.!.!."),  # and grows again
        ({"on_min": "raise", "hysteresis": 3}, "!!!.."),
        ({"on_min": "raise", "hysteresis": 2, "consecutive": True}, "!!.!.!."),  # is tolerated at the minimum
    ],
    ids=str,
)
def test_nothing_is_said_before_that(settings: dict[str, Any], trace: str) -> None:
    report(LossScale(**(NARROW | settings)), trace)


def test_a_fixed_scale_says_nothing_of_a_minimum() -> None:
    report(LossScale.fixed(2.0), "!!!!")


def test_too_many_skips_in_a_row_raise() -> None:
    config = LossScale(max_skips=3)
    report(config, "!!.!!.!!")
    with pytest.raises(polyamp.errors.LossScaleError, match="3 steps in a row"):
        report(config, "!!.!!!")
