"""What is concluded from a recorded step: the window, the recommendation, and what is said."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import polyamp
from polyamp import LossScale
from polyamp.diagnosis.probe import NOISE, Probe
from polyamp.diagnosis.recording import ACTIVATION, GRADIENT, PARAMETER, rounding
from polyamp.diagnosis.spread import Window
from support.diagnosis_cases import observation, recording

TINY, USUAL, LARGE = 2.0**-35, 2.0**-10, 2.0**6

gradients = st.lists(st.floats(2.0**-40, 2.0**10), min_size=1, max_size=12)


def probed(*observations, **settings) -> Probe:
    return Probe(recording(*observations), "float16", **settings)


def test_the_neediest_gradient_is_the_lower_edge_and_the_largest_the_upper_one() -> None:
    probe = probed(observation(GRADIENT, "a", TINY), observation(GRADIENT, "b", LARGE), margin=3)
    assert probe.window == Window(2.0**17, 2.0**6)  # 2^-26 / 2^-35 / 0.004; 2^15 / 2^6 less 3 bits
    assert probe.window.is_empty
    assert not probe.is_safe


@given(gradients, st.integers(0, 6))
def test_inside_the_window_nothing_overflows_and_no_more_is_lost_than_is_tolerated(values, margin) -> None:
    probe = probed(*(observation(GRADIENT, str(place), value) for place, value in enumerate(values)), margin=margin)
    low, high = probe.window
    for one in probe.bounding:
        assert one.spread.largest * high * 2.0**margin <= 65504
        assert one.spread.scaled(round(math.log2(low))).lost("float16") <= probe.tolerance


@given(gradients)
def test_the_recommendation_starts_inside_of_a_window_that_is_not_empty(values) -> None:
    probe = probed(*(observation(GRADIENT, str(place), value) for place, value in enumerate(values)))
    recommended = probe.recommended
    assert recommended.min < recommended.init <= recommended.max
    assert probe.window.is_empty or recommended.init in probe.window


@pytest.mark.parametrize(
    ("gradient", "recommended"),
    [
        (USUAL, LossScale()),
        (2.0**-45, LossScale(init=2.0**27, max=2.0**27)),
        (2.0**10, LossScale(init=2.0**2)),
    ],
)
def test_the_recommendation_is_the_default_where_the_window_has_it(gradient: float, recommended: LossScale) -> None:
    assert probed(observation(GRADIENT, "a", gradient)).recommended == recommended


@pytest.mark.parametrize(
    ("kind", "format_name"), [(ACTIVATION, "float16"), (GRADIENT, "float32"), (PARAMETER, "float32")]
)
def test_only_gradients_in_16_bits_bound_the_scale(kind, format_name) -> None:
    free = observation(kind, "free", TINY, LARGE * 100, format_name=format_name)
    alone = probed(observation(GRADIENT, "a", USUAL))
    assert probed(free, observation(GRADIENT, "a", USUAL)).window == alone.window
    assert probed(free).window is None
    assert probed(free).recommended == LossScale.skip_nonfinite()


def test_a_gradient_that_is_zero_but_for_rounding_sets_no_lower_limit() -> None:
    noise = observation(PARAMETER, "", USUAL * NOISE / 2, name="bias")
    assert probed(observation(GRADIENT, "a", USUAL), noise).window == probed(observation(GRADIENT, "a", USUAL)).window
    of_shift = observation(GRADIENT, "", USUAL * NOISE / 2, name="sum")  # as of a softmax's largest logit
    assert (
        probed(observation(GRADIENT, "a", USUAL), of_shift).window == probed(observation(GRADIENT, "a", USUAL)).window
    )
    deep = observation(GRADIENT, "deep", USUAL * NOISE / 2)  # of a product it is no rounding error
    assert probed(observation(GRADIENT, "a", USUAL), deep).window.low > 1


def test_gradients_that_no_scale_makes_right_are_told() -> None:
    loss = observation(ACTIVATION, "a", 1.0, 1.0)
    wide, narrow = (recording(loss, observation(PARAMETER, "", *ones, name="w")) for ones in ([4, 4], [1, 4]))
    found = rounding(narrow, wide, gradients=True)
    assert (found.first.name, found.mass, found.mass_float32) == ("w", 5.0, 8.0)
    assert "the gradient that differs most is w: 5 in place of 8" in str(replace(probed(loss), rounding=found))
    assert not replace(probed(loss), rounding=found).is_safe
    assert rounding(narrow, wide, gradients=False) is None
    assert rounding(wide, wide, gradients=True) is None


def test_bfloat16_needs_no_scale() -> None:
    probe = Probe(recording(observation(GRADIENT, "a", TINY, LARGE)), "bfloat16")
    assert 1.0 in probe.window
    assert probe.recommended == LossScale.skip_nonfinite()


def test_a_forward_overflow_is_told_with_a_rule_only_where_it_was_tried() -> None:
    probe = probed(observation(ACTIVATION, "block/3", 1e6), observation(GRADIENT, "block/3", USUAL))
    assert probe.rules == {"block/3/matmul": "full"}
    assert not probe.is_safe
    assert "rules=" not in str(probe)
    assert "rules={'block/3/matmul': 'full'}" in str(replace(probe, is_cured=True))
    assert replace(probe, fits=True).is_safe  # a mask


def test_what_is_not_finite_in_float32_is_told_as_such() -> None:
    probe = probed(observation(ACTIVATION, "a", math.nan, format_name="float32"), observation(GRADIENT, "a", USUAL))
    assert probe.broken.where == "a"
    assert "not finite in float32 either" in str(probe)


def test_the_json_has_every_tensor_and_no_inf(tmp_path) -> None:
    probe = probed(observation(ACTIVATION, "a", 0.0), observation(GRADIENT, "a", USUAL, math.inf))
    probe.save(tmp_path / "probe.json")
    saved = json.loads((tmp_path / "probe.json").read_text(), parse_constant=pytest.fail)
    assert saved["window"] == {"low": probe.window.low, "high": probe.window.high, "empty": probe.window.is_empty}
    assert [tensor["kind"] for tensor in saved["tensors"]] == ["activation", "activation gradient"]


@pytest.mark.parametrize(("name", "value"), [("tolerance", 2.0), ("margin", -1), ("scale", 0), ("scale", True)])
def test_a_setting_outside_its_range_is_refused_before_anything_runs(name, value) -> None:
    with pytest.raises(polyamp.errors.InvalidValueError, match=f"invalid {name}"):
        polyamp.probe(lambda: pytest.fail("it ran"), **{name: value})


def test_the_turns_of_a_recurrence_count_by_their_share_in_all_of_them() -> None:
    turns = [observation(GRADIENT, "cell", USUAL), observation(GRADIENT, "cell", TINY)]
    layers = [observation(GRADIENT, "", USUAL), observation(GRADIENT, "", TINY)]
    merged, apart = (Probe(recording(*ones).by_layer(), "float16") for ones in (turns, layers))
    assert (len(merged.bounding), len(apart.bounding)) == (1, 2)
    assert merged.window.low < 1 < apart.window.low
    assert merged.window.high == apart.window.high


def test_a_layers_different_tensors_stay_apart() -> None:
    ones = [observation(GRADIENT, "cell", USUAL), observation(GRADIENT, "cell", TINY, TINY)]
    ones += [observation(GRADIENT, "cell", TINY, name="add"), observation(ACTIVATION, "cell", USUAL)]
    assert recording(*ones).by_layer().observations == tuple(ones)
