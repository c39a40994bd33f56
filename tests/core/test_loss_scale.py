"""The loss-scale rule: its settings, its properties on any trace, its state, and what it reports."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import polyamp
from polyamp import LossScale, LossScaleState, advance
from polyamp.libraries import LIBRARIES
from polyamp.scale import on_host
from polyamp.settings import TYPES
from polyamp.skips import report_limits
from support.loss_scale_cases import TRACES, any_numbers, powers_of_two, read, walk

RECORDED = json.loads((Path(__file__).parents[1] / "support/data/loss_scalers.json").read_text())

# --- settings ---------------------------------------------------------------------------------------------------------

OUT_OF_RANGE = [
    *({name: bad} for name in ("init", "min", "max") for bad in (math.nan, math.inf, 0.0, -1.0)),
    *({"growth": bad} for bad in (1.0, 0.5, -2.0, math.nan, math.inf)),
    *({"backoff": bad} for bad in (0.0, 1.0, 2.0, -0.5, math.nan)),
    *({name: bad} for name in ("interval", "hysteresis", "max_skips") for bad in (0, -1)),
    {"min": 2.0**-150},
    {"max": 2.0**128},
    {"min": 4.0, "max": 2.0, "init": 3.0},
    {"init": 2.0**25},
    {"init": 2.0**-15},
    *({"on_min": bad} for bad in ("stop", None)),
    {"consecutive": 1},
    {"check": "yes"},
    {"late_growth": "sometimes"},
    {"growth": 1 + 1e-9},  # as a float32 number 1
    {"backoff": 1 - 1e-12},
    {"backoff": 1e-60},
    {"init": 10**400},
    *({name: 2**31} for name in ("interval", "hysteresis", "max_skips")),  # counters are int32
]
WRONG_TYPE = [
    *({name: bad} for name in ("init", "growth", "backoff", "min", "max") for bad in ("2", None, True, 2j)),
    *({name: bad} for name in ("interval", "hysteresis") for bad in (2.0, "2", None, True)),
    {"max_skips": 1.5},
]


REFUSED = [(one, ValueError) for one in OUT_OF_RANGE] + [(one, TypeError) for one in WRONG_TYPE]


@pytest.mark.parametrize(("settings", "kind"), REFUSED, ids=str)
def test_settings_of_a_wrong_value_or_type_are_refused(settings: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(polyamp.PolyampError, match=next(iter(settings))) as caught:
        LossScale(**settings)
    assert isinstance(caught.value, kind)


def test_the_page_lists_every_setting() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/loss_scale.md").read_text()
    names = re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in page.splitlines() if row.startswith("| `")))
    assert set(names) >= {field.name for field in fields(LossScale)}


@given(any_numbers())
def test_settings_survive_json(config: LossScale) -> None:
    assert LossScale.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert eval(repr(config), {"LossScale": LossScale}) == config


# --- the rule ---------------------------------------------------------------------------------------------------------


@given(any_numbers(), TRACES)
def test_the_scale_stays_within_its_limits(config: LossScale, trace: list[bool]) -> None:
    for state in walk(config, trace):
        assert config.min <= state.scale <= config.max
        assert math.isfinite(state.scale)


@given(powers_of_two(), TRACES)
def test_the_scale_stays_a_power_of_two(config: LossScale, trace: list[bool]) -> None:
    assert all(math.frexp(state.scale)[0] == 0.5 for state in walk(config, trace))


@given(powers_of_two(), TRACES)
def test_skips_are_counted(config: LossScale, trace: list[bool]) -> None:
    states = walk(config, trace)
    for step, state in enumerate(states, start=1):
        seen = trace[:step]
        assert state.skipped == seen.count(False)
        assert state.skipped_in_a_row == next((n for n, finite in enumerate(reversed(seen)) if finite), step)


@given(st.one_of(powers_of_two(), any_numbers()), TRACES)
def test_steps_and_growths_are_counted(config: LossScale, trace: list[bool]) -> None:
    states = [config.initial_state(), *walk(config, trace)]
    rose = [step for step in range(1, len(states)) if states[step].scale > states[step - 1].scale]
    skipped = [step for step, finite in enumerate(trace, start=1) if not finite]
    last = states[-1]
    assert (last.steps, last.growths, last.grown_at) == (len(trace), len(rose), max(rose, default=0))
    assert last.calibrating == sum(not rose or step < rose[0] for step in skipped)
    assert last.overflow_scale == (states[skipped[-1] - 1].scale if skipped else 0)


@given(powers_of_two(), TRACES)
def test_the_scale_moves_only_as_gradients_say(config: LossScale, trace: list[bool]) -> None:
    before = config.init
    for finite, state in zip(trace, walk(config, trace), strict=True):
        allowed = (
            (before, min(before * config.growth, config.max))
            if finite
            else (before, max(before * config.backoff, config.min))
        )
        assert state.scale in allowed
        before = state.scale


@given(st.one_of(powers_of_two(), any_numbers()), TRACES)
def test_the_common_case_on_the_host_is_the_rule_too(config: LossScale, trace: list[bool]) -> None:
    """``advance`` returns early there, but not with a selection of the caller's."""
    assert walk(config, trace) == walk(config, trace, where=lambda condition, one, other: one if condition else other)


@given(TRACES)
def test_a_fixed_scale_never_moves_but_counts_skips(trace: list[bool]) -> None:
    states = walk(LossScale.fixed(96.0), trace)
    assert {state.scale for state in states} == {96.0}
    assert states[-1].skipped == trace.count(False)


@given(TRACES)
def test_without_a_check_nothing_happens(trace: list[bool]) -> None:
    config = LossScale.none()
    assert set(walk(config, trace)) == {config.initial_state()}


FORMS: dict[str, tuple[dict[str, Any], str, list[int]]] = {
    "every interval": ({"interval": 3}, ".... ...!..!...", [16, 16, 17, 17, 17, 18, 18, 17, 17, 17, 16, 16, 16, 17]),
    "hysteresis": ({"interval": 3, "hysteresis": 2}, "!.!..!...!.", [16, 16, 15, 15, 15, 14, 14, 14, 15, 15, 15]),
    "consecutive": (
        {"interval": 9, "hysteresis": 2, "consecutive": True},
        "!.!.!!!.!!",
        [16, 16, 16, 16, 16, 15, 14, 14, 14, 13],
    ),
    "late after overflow": (
        {"interval": 2, "late_growth": "after_overflow"},
        ".....!...",
        [16, 16, 17, 17, 18, 17, 17, 17, 18],
    ),
    "always late": ({"interval": 2, "late_growth": "always"}, "......!...", [16, 16, 17, 17, 17, 18, 17, 17, 17, 18]),
    "limits": ({"interval": 1, "min": 2.0**15, "max": 2.0**17}, "...!!!!.", [17, 17, 17, 16, 15, 15, 15, 16]),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_forms_of_the_rule(form: str) -> None:
    settings, trace, exponents = FORMS[form]
    states = walk(LossScale(**settings), read(trace))
    assert [int(math.log2(state.scale)) for state in states] == exponents


def on_numpy(config: LossScale) -> LossScaleState:
    dtypes = {float: np.float32, int: np.int32}
    return LossScaleState(*(dtypes[kind](value) for kind, value in zip(TYPES, config.initial_state(), strict=True)))


@given(powers_of_two(), TRACES)
def test_numpy_takes_the_same_steps_as_python_numbers(config: LossScale, trace: list[bool]) -> None:
    for ours, state in zip(walk(config, trace), walk(config, trace, on_numpy(config), where=np.where), strict=True):
        assert on_host(state) == ours
        assert [type(field) for field in on_host(state)] == list(TYPES)
        assert [np.asarray(field).dtype for field in state] == [np.float32, *[np.int32] * 8, np.float32]


@pytest.mark.parametrize("scale", [2.0**30, 2.0**-20, 0.0, -8.0, math.inf, math.nan])
@pytest.mark.parametrize("finite", [True, False])
def test_a_scale_outside_of_its_limits_starts_again(scale: float, finite: bool) -> None:
    config = LossScale(max=2.0**20)
    left = config.initial_state()._replace(scale=scale)
    assert advance(config, left, finite).scale == advance(config, config.initial_state(), finite).scale


LAST = 2**31 - 1


@pytest.mark.parametrize("finite", [True, False])
def test_counters_stay_at_the_largest_count(finite: bool) -> None:
    config = LossScale(interval=LAST)
    full = config.initial_state()._replace(
        **dict.fromkeys(("good_steps", "skipped_in_a_row", "skipped", "steps", "calibrating"), LAST)
    )
    after = advance(config, full._replace(good_steps=0), finite)
    assert (after.steps, after.skipped, after.calibrating) == (LAST, LAST, LAST)
    assert after.skipped_in_a_row == (0 if finite else LAST)
    assert advance(config, full, True).growths == 1


@pytest.mark.parametrize("flag", [np.True_, np.array(True), 1])
def test_a_flag_of_another_type_is_a_flag(flag: Any) -> None:
    config = LossScale()
    after = advance(config, config.initial_state(), flag)
    assert after == advance(config, config.initial_state(), True)
    assert [type(field) for field in after] == list(TYPES)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (lambda config, state: ("dynamic", state, True), "config"),
        (lambda config, state: (config, tuple(state), True), "state"),
        (lambda config, state: (config, state, True, "where"), "where"),
        (lambda config, state: (config, state, np.array([True, False])), "finite"),
    ],
)
def test_what_cannot_advance_is_refused(arguments: Callable[..., Any], says: str) -> None:
    config = LossScale()
    with pytest.raises(polyamp.errors.InvalidTypeError, match=says):
        advance(*arguments(config, config.initial_state()))


# --- other libraries --------------------------------------------------------------------------------------------------

RUNS = [(name, run) for name, library in RECORDED.items() for run in library["runs"]]


def scales_of(run: dict[str, Any], init: float) -> list[float]:
    """The scale after every step of a recorded run, which keeps only the changes."""
    scales, changes = [], dict(run["log2_scale"])
    for step in range(run["steps"]):
        init = 2.0 ** changes[step] if step in changes else init
        scales.append(init)
    return scales


@pytest.mark.parametrize(("name", "run"), RUNS, ids=[f"{name}-{number}" for number, (name, _) in enumerate(RUNS)])
def test_presets_repeat_recorded_runs(name: str, run: dict[str, Any]) -> None:
    """Runs of libraries that cannot be installed beside the others; tests/support/data says which versions."""
    config = LossScale.like(name, **run["settings"])
    states = walk(config, [step not in run["overflows"] for step in range(run["steps"])])
    last = run["steps"] if run["raises_at"] is None else run["raises_at"]
    assert [state.scale for state in states[:last]] == scales_of(run, config.init)[:last]
    for step, state in enumerate(states if config.on_min == "raise" else []):
        if step == run["raises_at"]:
            with pytest.raises(polyamp.errors.LossScaleError, match="minimum"):
                report_limits(config, state)
        else:
            report_limits(config, state)


@pytest.mark.parametrize("name", LIBRARIES)
def test_presets_say_where_they_come_from(name: str) -> None:
    assert LIBRARIES[name].source
    assert LossScale.like(name, interval=7).interval == 7
    assert LossScale.like(name).dynamic


# --- the state --------------------------------------------------------------------------------------------------------


@given(
    st.builds(
        LossScaleState,
        st.floats(LossScale().min, LossScale().max),
        *[st.integers(-1, 2**31 - 1)] * 2,
        *[st.integers(1, 2**31 - 1)] * 6,  # with zeros it can be a state without scaling
        st.floats(0, LossScale().max),
    )
)
def test_every_field_survives_json(state: LossScaleState) -> None:
    saved = json.loads(json.dumps(LossScale().to_state_dict(state)))
    loaded = LossScale().from_state_dict(saved)
    assert loaded == state
    assert tuple(map(type, loaded)) == TYPES


@given(powers_of_two(), TRACES, TRACES)
def test_a_loaded_state_continues_exactly(config: LossScale, first: list[bool], then: list[bool]) -> None:
    saved = config.to_state_dict(walk(config, first)[-1])
    assert walk(config, then, config.from_state_dict(saved)) == walk(config, first + then)[len(first) :]


GOOD = LossScale().to_state_dict(LossScale().initial_state())


@pytest.mark.parametrize(
    ("saved", "says"),
    [
        (None, "NoneType"),
        ([1], "list"),
        ({}, "kind None"),
        (GOOD | {"kind": "torch.amp.GradScaler"}, "GradScaler"),
        ({key: value for key, value in GOOD.items() if key != "scale"}, "no scale"),
        (GOOD | {"skipped": 1.5}, "wrong types"),
        (GOOD | {"good_steps": None}, "wrong types"),
        (GOOD | {"steps": 1.5}, "wrong types"),
        (GOOD | {"overflow_scale": "large"}, "wrong types"),
        (GOOD | {"scale": "large"}, "wrong types"),
        (GOOD | {"scale": True}, "wrong types"),
        *((GOOD | {name: value}, "not a count") for name, value in (("skipped", -1), ("hysteresis", -7))),
        *((GOOD | {name: 2**31}, "not a count") for name in ("steps", "good_steps")),
        *((GOOD | {"overflow_scale": value}, "not a loss scale") for value in (math.nan, math.inf)),
        (GOOD | {"scale": 10**400}, "wrong types"),
        (GOOD | {"version": 2}, "another version"),
        *((GOOD | {"scale": scale}, "outside") for scale in (math.nan, math.inf, 0.0, -1.0, 2.0**-15, 2.0**25)),
    ],
    ids=str,
)
def test_a_wrong_state_is_refused(saved: Any, says: str) -> None:
    with pytest.raises(polyamp.errors.StateError, match=says):
        LossScale().from_state_dict(saved)


# --- reports of a scale at its minimum, and of too many skipped steps in a row ---------------------------------------


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
        ({"max": 2.0, "init": 2.0}, "!!!!"),  # a fixed scale
        ({"on_min": "raise"}, "!..."),  # comes down to the minimum, where nothing overflows
        ({"on_min": "raise", "interval": 1}, "!.!.!."),  # and grows again
        ({"on_min": "raise", "hysteresis": 3}, "!!!.."),
        ({"on_min": "raise", "hysteresis": 2, "consecutive": True}, "!!.!.!."),  # is tolerated at the minimum
    ],
    ids=str,
)
def test_nothing_is_said_before_that(settings: dict[str, Any], trace: str) -> None:
    report(LossScale(**(NARROW | settings)), trace)


def test_too_many_skips_in_a_row_raise() -> None:
    config = LossScale(max_skips=3)
    report(config, "!!.!!.!!")
    with pytest.raises(polyamp.errors.LossScaleError, match="3 steps in a row"):
        report(config, "!!.!!!")
