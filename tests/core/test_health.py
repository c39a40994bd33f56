"""What the counters of the loss scale mean: kinds of skips, states of health, and who is told of them when."""

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

import polyamp
from polyamp import LossScale, advance
from polyamp.diagnosis.health import FINDINGS, Health, health, watch
from polyamp.diagnosis.spread import Window
from support.loss_scale_cases import TRACES, any_numbers, powers_of_two, read, walk

QUICK = {"init": 2.0**16, "interval": 3, "on_min": "ignore"}


class Probed(NamedTuple):
    """As much of a probe as health looks at."""

    window: Window | None


def after(trace: str, probe: Any = None, **settings: Any) -> Health:
    config = LossScale(**(QUICK | settings))
    return Health(config, [config.initial_state(), *walk(config, read(trace))][-1], probe)


# --- states -----------------------------------------------------------------------------------------------------------

NARROW = {"init": 8.0, "min": 4.0, "max": 16.0}
STATES: dict[str, tuple[str, dict[str, Any], str]] = {
    "nothing yet": ("", {}, "calibrating"),
    "coming down": ("!!!!!!", {}, "calibrating"),
    "down to 1": ("!" * 16, {}, "calibrating"),
    "below 1": ("!" * 17, {}, "spiral"),
    "a first scale below 1": ("!", {"init": 0.5}, "underflowing"),
    "found": ("!!...", {}, "ok"),
    "one growth too many": ("...!", {}, "ok"),
    "three skips": ("...!!!", {}, "ok"),
    "four skips": ("...!!!!", {}, "spiral"),
    "four skips of which one is tolerated": ("...!!!!", {"hysteresis": 2}, "ok"),
    "five skips of which one is tolerated": ("...!!!!!", {"hysteresis": 2}, "spiral"),
    "four skips that undo a large growth": ("...!!!!!", {"growth": 8.0}, "ok"),
    "six skips that more than undo it": ("...!!!!!!", {"growth": 8.0}, "spiral"),
    "a limit of its own": ("!!", {"max_skips": 2}, "spiral"),
    "below 1 for now": ("!" * 17 + ".", {}, "underflowing"),
    "at the minimum": ("!", NARROW, "frozen"),
    "again at the minimum": ("...!!.", NARROW, "frozen"),
    "beginning at the minimum": ("..", NARROW | {"init": 4.0}, "calibrating"),
    "at the maximum": ("...", NARROW, "frozen"),
    "beginning at the maximum": (".", NARROW | {"init": 16.0}, "frozen"),
}


@pytest.mark.parametrize("case", STATES)
def test_the_states(case: str) -> None:
    trace, settings, state = STATES[case]
    assert after(trace, **settings).state == state


@pytest.mark.parametrize(
    ("trace", "window", "state"),
    [
        ("...", (2.0**7, 2.0**20), "ok"),
        ("...", (2.0**18, 2.0**20), "underflowing"),
        ("!!!!!!!!!!", (2.0**7, 2.0**20), "underflowing"),
        ("!!", (2.0**7, 2.0**20), "calibrating"),
        ("!" * 17 + "...", (2.0**-8, 2.0**-3), "ok"),
    ],
)
def test_a_probed_window_says_what_is_too_small(trace: str, window: tuple[float, float], state: str) -> None:
    assert after(trace, Probed(Window(*window))).state == state


@pytest.mark.parametrize(
    ("trace", "probe", "margin"),
    [
        ("...", None, None),
        ("!", None, 1.0),
        ("!...", None, 0.0),
        ("!!.", Probed(None), 1.0),
        ("...", Probed(Window(1.0, 2.0**20)), 3.0),
        ("...", Probed(Window(1.0, 2.0**15)), -2.0),
    ],
)
def test_the_margin_is_up_to_what_is_too_much(trace: str, probe: Any, margin: float | None) -> None:
    assert after(trace, probe).margin == margin


@pytest.mark.parametrize(
    ("settings", "trace", "state"),
    [
        (LossScale.none(), "!!!!!!", "ok"),
        (LossScale.fixed(128), "", "ok"),
        (LossScale.fixed(128), "!!!", "ok"),
        (LossScale.fixed(128), "!!!!", "spiral"),
        (LossScale.fixed(0.5), "...", "underflowing"),
    ],
    ids=str,
)
def test_scales_that_never_move(settings: LossScale, trace: str, state: str) -> None:
    found = Health(settings, [settings.initial_state(), *walk(settings, read(trace))][-1])
    assert (found.state, found.calibrating, found.periodic) == (state, 0, 0)
    assert found.unexpected == (trace.count("!") if settings.check else 0)


@pytest.mark.parametrize(
    ("trace", "settings", "line"),
    [
        ("", {}, "steps 0  skipped 0  scale 2^16  calibrating"),
        ("!!..", {}, "steps 4  skipped 2 (2 calibrating)  scale 2^14  margin +1.0 bits  calibrating"),
        (
            "!...!!.",
            {},
            "steps 7  skipped 3 (1 calibrating, 1 periodic, 1 unexpected)  scale 2^14  last growth 3 steps ago  "
            "margin +1.0 bits  ok",
        ),
        (
            "...!!!!",
            {},
            "steps 7  skipped 4 (1 periodic, 3 unexpected)  scale 2^13  last growth 4 steps ago  margin +1.0 bits  "
            "spiral: 4 steps skipped in a row",
        ),
        (
            "...",
            NARROW,
            "steps 3  skipped 0  scale 2^4  last growth 0 steps ago  frozen: the scale is at its maximum, 2^4",
        ),
    ],
)
def test_it_is_one_line(trace: str, settings: dict[str, Any], line: str) -> None:
    assert str(after(trace, **settings)) == line


def model_that_bears(limit: float, config: LossScale, steps: int) -> Iterator[Health]:
    """Health after each step of a model whose gradients overflow at scales above ``limit``."""
    state = config.initial_state()
    for _ in range(steps):
        state = advance(config, state, state.scale <= limit)
        yield Health(config, state)


@given(st.integers(0, 26), st.integers(0, 24), st.integers(1, 6))
def test_a_scale_that_does_its_work_is_never_alarming(limit: int, init: int, interval: int) -> None:
    """Before the scale fits, it comes down; then every growth costs one step at most."""
    config = LossScale(init=2.0**init, interval=interval)
    for found in model_that_bears(2.0**limit, config, steps=120):
        assert not found.alarming, str(found)
        assert found.unexpected == 0


@given(st.integers(-13, 23), st.integers(0, 24))
def test_a_model_that_overflows_at_any_scale_ends_in_a_spiral(limit: int, init: int) -> None:
    config = LossScale(init=2.0**init, interval=4, on_min="ignore")
    *_, found = model_that_bears(2.0**limit, config, steps=50)
    state = found.counters
    for _ in range(45):
        state = advance(config, state, False)
    assert Health(config, state).state == "spiral"


@given(st.one_of(powers_of_two(), any_numbers()), TRACES)
def test_every_skip_is_of_one_kind_and_any_health_is_json(config: LossScale, trace: list[bool]) -> None:
    for state in walk(config, trace):
        found = Health(config, state)
        kinds = (found.calibrating, found.periodic, found.unexpected)
        assert min(kinds) >= 0
        assert sum(kinds) == found.skipped
        assert found.last_growth is None or 0 <= found.last_growth < found.steps
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False)) == found.as_dict()
    assert found.finding in FINDINGS.values()
    assert found.why


WRONG: dict[str, Callable[[], object]] = {
    **{f"a holder: {one!r}": lambda one=one: health(one) for one in (3, None, [1.0])},  # type: ignore[misc]
    "invalid probe": lambda: health(None, probe="a"),  # type: ignore[arg-type]
    "watch.step": lambda: watch(3),  # type: ignore[type-var]
    "after must be": lambda: watch(print, after=2.5),  # type: ignore[arg-type]
    "watch.on_verdict": lambda: watch(print, on_verdict=3),  # type: ignore[arg-type]
    "at least 1": lambda: watch(print, after=0),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused(case: str) -> None:
    with pytest.raises(polyamp.PolyampError, match="no adapter knows" if "holder" in case else case):
        WRONG[case]()
