"""Loss scales saved by other libraries, by other policies or by hand, and written in the form of another library."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from polyamp import LossScale, LossScaleState, PolyampWarning
from polyamp.errors import InvalidValueError, StateError
from polyamp.libraries import LIBRARIES
from support.loss_scale_cases import walk

DYNAMIC, NONE = LossScale(), LossScale.none()
TORCH = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 7}
DEEPSPEED = {"dynamic_loss_scale": True, "cur_scale": 512, "cur_iter": 9, "last_overflow_iter": 4, "scale_window": 50}

SAVED = {
    "torch": (TORCH, 1024.0, 7),
    "lightning": ({"MixedPrecision": TORCH, "state_dict": {}}, 1024.0, 7),
    "apex": ({"loss_scaler0": {"loss_scale": 512.0, "unskipped": 3}}, 512.0, 3),
    "apex, one": ({"loss_scale": 512.0, "unskipped": 3}, 512.0, 3),
    "deepspeed": (DEEPSPEED, 512.0, 3),
    "deepspeed zero": ({"loss_scaler": SimpleNamespace(**DEEPSPEED), "overflow": False}, 512.0, 3),
    "megatron": ({"grad_scaler": {"scale": 4.0, "growth_tracker": 2, "hysteresis_tracker": 1}}, 4.0, 2),
    "fairseq": ({"loss_scale": 8.0}, 8.0, 0),
    "tensorflow": ({"current_loss_scale": 8.0, "good_steps": 5}, 8.0, 5),
    "by hand": ({"scale": 8.0, "good_steps": 5, "skipped": 2}, 8.0, 5),
    "the scale alone": ({"scale": 8.0}, 8.0, 0),
}


@pytest.mark.parametrize(("saved", "scale", "good_steps"), SAVED.values(), ids=SAVED)
def test_states_of_other_libraries(saved: Any, scale: float, good_steps: int) -> None:
    state = DYNAMIC.from_state_dict(saved)
    assert state[:2] == (scale, good_steps)
    assert state.hysteresis == 1
    assert state.skipped == (saved.get("skipped", 0))
    assert state[5:] == (0, 0, 0, 0, 0.0)


@pytest.mark.parametrize("name", ["good_steps", "hysteresis", "skipped_in_a_row", "skipped", "steps"])
def test_a_counter_that_is_not_there_is_what_it_is_at_the_start(name: str) -> None:
    saved = DYNAMIC.to_state_dict(LossScaleState(8.0, 3, 1, 4, 5, 6, 7))
    del saved[name]
    loaded = DYNAMIC.from_state_dict(saved)
    assert loaded == LossScaleState(8.0, 3, 1, 4, 5, 6, 7)._replace(**{name: getattr(DYNAMIC.initial_state(), name)})


def test_the_hysteresis_of_megatron_falls_at_every_overflow() -> None:
    config = LossScale.like("megatron")
    state = config.from_state_dict({"scale": 64.0, "growth_tracker": 0, "hysteresis_tracker": -6})
    assert state.hysteresis == 0
    assert walk(config, [False], state)[0].scale == 32.0


def test_of_several_apex_losses_the_first_is_taken() -> None:
    saved = {f"loss_scaler{index}": {"loss_scale": 2.0**index, "unskipped": index} for index in range(3)}
    with pytest.warns(PolyampWarning, match="several loss scales"):
        assert DYNAMIC.from_state_dict(saved)[:2] == (1.0, 0)


# --- another format's policy ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trace", [[], [True] * 3, [True, False, False], [False, True]], ids=str)
def test_a_state_saved_without_scaling_starts_at_init_and_says_so(trace: list[bool]) -> None:
    config = LossScale.skip_nonfinite()
    state = [config.initial_state(), *walk(config, trace)][-1]
    with pytest.warns(PolyampWarning, match=r"without a loss scale.*init = 65536"):
        loaded = DYNAMIC.from_state_dict(config.to_state_dict(state))
    assert loaded[:3] == DYNAMIC.initial_state()[:3]
    assert (loaded.steps, loaded.skipped) == (len(trace), trace.count(False))


@pytest.mark.parametrize("config", [NONE, LossScale.fixed(1.0)], ids=repr)
@pytest.mark.parametrize(
    "saved", [DYNAMIC.to_state_dict(LossScaleState(32768.0, 3, 1, 1, 2, 9)), TORCH], ids=["ours", "torch"]
)
def test_a_scaled_state_is_taken_without_its_scale_where_nothing_scales(config: LossScale, saved: Any) -> None:
    with pytest.warns(PolyampWarning, match=r"loss scale of .* does not scale"):
        state = config.from_state_dict(saved)
    assert state.scale == 1.0
    assert (state.skipped, state.steps) == (saved.get("skipped", 0), saved.get("steps", 0))


def test_a_scale_of_one_that_was_in_use_stays() -> None:
    saved = DYNAMIC.to_state_dict(LossScaleState(1.0, 3, 1, 0, 16, 40))
    assert DYNAMIC.from_state_dict(saved).scale == 1.0


# --- what is not a state ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved", [3, "fp16", [1.0], object(), {"epoch": 3}, {5: 1}, {"loss_scaler0": 3}], ids=repr)
def test_what_is_no_loss_scale_is_refused(saved: Any) -> None:
    with pytest.raises(StateError, match=r"not a loss-scale state(?s:.)*torch, apex"):
        DYNAMIC.from_state_dict(saved)


def test_settings_with_keys_that_are_no_names_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="unknown loss-scale setting"):
        LossScale.from_dict({5: 1})  # type: ignore[dict-item]


# --- written in the form of another library ---------------------------------------------------------------------------


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


@pytest.mark.parametrize("config", [NONE, LossScale.skip_nonfinite()], ids=repr)
def test_a_scale_that_multiplies_nothing_is_a_disabled_scaler_in_torch(config: LossScale) -> None:
    assert config.to_state_dict(config.initial_state(), like="torch") == {}
