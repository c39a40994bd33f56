"""What is reported when a loss scale is written in the form of another library."""

from __future__ import annotations

import warnings

import pytest

from polyamp import LossScale, LossScaleState
from polyamp.errors import InvalidValueError, PolyampWarning
from polyamp.libraries import LIBRARIES


@pytest.mark.parametrize("name", LIBRARIES)
def test_nothing_is_lost_of_an_unused_scale_under_the_library_s_own_settings(name: str) -> None:
    config = LossScale.like(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config.to_state_dict(config.initial_state(), like=name)


@pytest.mark.parametrize(
    ("config", "like", "reports"),
    [
        (LossScale.like("torch", hysteresis=2), "torch", "hysteresis=2 .no such setting"),
        (LossScale.like("torch", max=2.0**24), "torch", "max=16777216.0"),
        (LossScale.like("keras", growth=4.0), "keras", "growth=4.0"),
        (LossScale.like("jmp", backoff=0.25), "jmp", "backoff=0.25"),
        (LossScale.like("deepspeed", late_growth="never"), "deepspeed", "late_growth='never'"),
        (LossScale.fixed(8.0), "torch", "min=8.0, max=8.0"),
        (LossScale.none(), "apex", "check=False"),
    ],
    ids=str,
)
def test_settings_that_the_library_does_not_have_are_reported(config: LossScale, like: str, reports: str) -> None:
    with pytest.warns(PolyampWarning, match=reports):
        config.to_state_dict(config.initial_state(), like=like)


@pytest.mark.parametrize(
    ("config", "like"),
    [
        (LossScale.like("torch", growth=4.0, backoff=0.25, interval=7), "torch"),
        (LossScale.like("jmp", growth=4.0, backoff=0.25, min=0.5), "jmp"),
        (LossScale.like("torch", consecutive=True), "torch"),
        (LossScale.fixed(8.0), "jmp"),
        (LossScale.fixed(8.0), "deepspeed"),
        (LossScale.none(), "torch"),
    ],
    ids=str,
)
def test_settings_that_the_library_has_are_not_reported(config: LossScale, like: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config.to_state_dict(config.initial_state(), like=like)


def test_counters_that_are_lost_are_named_once() -> None:
    config = LossScale.like("torch")
    state = LossScaleState(8.0, 3, 1, 1, 2, 9)
    with pytest.warns(PolyampWarning, match="torch does not express skipped_in_a_row, skipped, steps .lost"):
        config.to_state_dict(state, like="torch")
    config.to_state_dict(state, like="torch")  # a second warning would be an error


def test_fairseq_loses_the_count_of_finite_steps() -> None:
    config = LossScale.like("fairseq")
    with pytest.warns(PolyampWarning, match="good_steps"):
        config.to_state_dict(LossScaleState(8.0, 3, 1, 0, 0), like="fairseq")


def test_a_disabled_torch_scaler_has_an_empty_state() -> None:
    none = LossScale.none()
    assert none.to_state_dict(none.initial_state(), like="torch") == {}


def test_an_unknown_library_is_refused() -> None:
    config = LossScale()
    with pytest.raises(InvalidValueError, match="did you mean megatron"):
        config.to_state_dict(config.initial_state(), like="megatrn")
