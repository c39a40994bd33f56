"""The verdict on an overflow: the first tensor that is not finite decides, and float32 tells why."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyamp import policy
from polyamp.diagnosis.diagnose import Calibration, Verdict, calibrate
from polyamp.diagnosis.probe import Probe
from polyamp.diagnosis.recording import ACTIVATION, GRADIENT, PARAMETER, Observation
from polyamp.errors import InvalidTypeError, InvalidValueError
from polyamp.rules import Rule
from support.diagnosis_cases import observation, recording

INF, NAN = math.inf, math.nan
SCALE = 2.0**16


def verdict(real: list[Observation], wide: list[Observation]) -> Verdict:
    true, float32 = recording(*real, scale=SCALE), recording(*wide)
    return Verdict(true, float32, Probe(float32, "float16"))


def test_the_first_gradient_of_all_means_that_the_scale_is_too_high() -> None:
    real = [
        observation(ACTIVATION, "head", 1.0),
        observation(GRADIENT, "head", INF),
        observation(GRADIENT, "body", NAN),
    ]
    wide = [
        observation(ACTIVATION, "head", 1.0),
        observation(GRADIENT, "head", 8.0),
        observation(GRADIENT, "body", 9.0),
    ]
    found = verdict(real, wide)
    assert (found.kind, found.first.where, found.rules) == ("scale", "head", {})
    assert "about 4 skipped steps" in found.advice  # 2^16 to 2^12 is the largest that 8.0 bears, and 2^9 is safe
    assert "LossScale(init=64.0)" not in found.advice


def test_a_gradient_that_one_layer_blows_up_is_that_layers_doing() -> None:
    real = [observation(GRADIENT, "head", 100.0), observation(GRADIENT, "body/3", INF)]
    wide = [observation(GRADIENT, "head", 100.0 / SCALE), observation(GRADIENT, "body/3", 5.0)]
    found = verdict(real, wide)
    assert (found.kind, found.rules) == ("layer", {"body/3": "full"})
    assert found.amplification == pytest.approx(math.log2(5.0 * SCALE / 100))
    assert "rules={'body/3': 'full'}" in found.advice


def test_a_float32_layer_that_blows_gradients_up_for_the_16_bit_one_below_is_to_blame() -> None:
    wide = [observation(GRADIENT, "head", 100.0 / SCALE), observation(GRADIENT, "norm", 5.0, format_name="float32")]
    real = [observation(GRADIENT, "head", 100.0), observation(GRADIENT, "norm", 5.0 * SCALE, format_name="float32")]
    bad = observation(PARAMETER, "", NAN, name="body.weight")
    found = verdict([*real, bad], [*wide, observation(PARAMETER, "", 1.0, name="body.weight")])
    assert (found.kind, found.first.name, found.rules) == ("layer", "body.weight", {"norm": "full"})


def test_large_gradients_of_a_float32_loss_are_no_layers_doing() -> None:
    loss = observation(GRADIENT, "loss", 5.0, format_name="float32")
    scaled = observation(GRADIENT, "loss", 5.0 * SCALE, format_name="float32")
    found = verdict([scaled, observation(GRADIENT, "head", INF)], [loss, observation(GRADIENT, "head", 5.0)])
    assert found.kind == "scale"


def test_tensors_at_the_same_place_are_told_apart() -> None:
    real = [observation(GRADIENT, "", 1.0), observation(GRADIENT, "", 2.0), observation(GRADIENT, "", INF)]
    wide = [observation(GRADIENT, "", 1e-9), observation(GRADIENT, "", 2.0**-10), observation(GRADIENT, "", 1.0)]
    found = verdict(real, wide)
    assert (found.kind, found.amplification) == ("layer", 10.0)
    assert found.recording.names == ["matmul[0]", "matmul[1]", "matmul[2]"]


def test_a_sum_over_the_batch_is_no_layer_that_amplifies() -> None:
    real = [observation(GRADIENT, "head", 100.0), observation(PARAMETER, "", INF, name="head.weight")]
    wide = [observation(GRADIENT, "head", 100.0 / SCALE), observation(PARAMETER, "", 5.0, name="head.weight")]
    assert verdict(real, wide).kind == "scale"


def test_a_forward_overflow_is_no_matter_of_the_scale() -> None:
    real = [observation(ACTIVATION, "body", INF), observation(GRADIENT, "body", NAN)]
    wide = [observation(ACTIVATION, "body", 1e6), observation(GRADIENT, "body", 1.0)]
    found = verdict(real, wide)
    assert (found.kind, found.rules) == ("forward", {"body/matmul": "full"})
    assert "can never help" in found.advice


def test_what_16_bits_lost_in_the_forward_pass_is_blamed_where_it_was_lost() -> None:
    logarithm = observation(ACTIVATION, "head", -INF, name="log", format_name="float32")
    real = [observation(ACTIVATION, "head", 0.0, name="mul"), logarithm]
    wide = [observation(ACTIVATION, "head", 1e-9, name="mul"), observation(ACTIVATION, "head", -20.0, name="log")]
    found = verdict(real, wide)
    assert (found.kind, found.rules) == ("forward", {"head/mul": "full"})


def test_a_model_that_is_not_finite_in_float32_is_not_blamed_on_precision() -> None:
    broken = [observation(ACTIVATION, "body", NAN, format_name="float32")]
    found = verdict(broken, broken)
    assert (found.kind, found.rules) == ("model", {})


def test_a_step_that_is_finite_is_said_to_be() -> None:
    fine = [observation(ACTIVATION, "body", 1.0), observation(GRADIENT, "body", 2.0)]
    found = verdict(fine, fine)
    assert (found.kind, found.first) == ("finite", None)
    assert "every tensor is finite" in str(found)


def test_the_text_shows_what_came_before_and_marks_the_first() -> None:
    real = [observation(GRADIENT, f"layer{place}", 2.0**place) for place in range(8)]
    real += [observation(GRADIENT, "bad", INF), observation(GRADIENT, "after", NAN)]
    lines = str(verdict(real, real[:8])).splitlines()
    (marked,) = [line for line in lines if "<- the first" in line]
    assert "bad/matmul" in marked
    assert "1 inf of 1" in lines[0]
    assert "layer2" not in str(lines)


def test_a_calibration_is_not_safe_if_no_loss_scale_suits_all_batches() -> None:
    batches = [[observation(GRADIENT, "head", largest)] for largest in (2.0**-30, 2.0**12)]
    each = tuple(verdict(one, one) for one in batches)
    assert all(one.is_safe for one in each)
    found = Calibration(policy("mixed_float16"), {}, each, each)
    assert not found.is_safe
    last = str(found).splitlines()[-1]
    assert last == "not safe: a loss scale that one batch needs is too large for another; bfloat16 needs none"
    assert "with the rules: none (at least 2^" in str(found)


def test_a_calibration_prints_its_rules_to_paste_and_is_json() -> None:
    overflow = [observation(ACTIVATION, "body", 1e6), observation(GRADIENT, "head", 2.0**-10)]
    kept = [observation(ACTIVATION, "body", 1e6, format_name="float32"), overflow[1]]
    bad = verdict([observation(ACTIVATION, "body", INF), observation(GRADIENT, "head", NAN)], overflow)
    found = Calibration(policy("mixed_float16"), {"body/matmul": bad}, (bad,), (verdict(kept, kept),))
    assert str(found).splitlines() == [
        "torch, mixed_float16: 1 batch, 1 rule to add",
        "",
        "rule         why",
        f"body/matmul  {bad.fault}",
        "",
        "rules={",
        '    "body/matmul": "full",',
        "}",
        "",
        "safe loss scales: none, the forward pass overflows; with the rules: 2^-8 .. 2^22",
    ]
    assert found.is_safe
    saved = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert (saved["rules"], saved["before"], saved["after"]) == ({"body/matmul": "full"}, ["forward"], ["finite"])


@pytest.mark.parametrize(
    ("step", "batches", "error", "text"),
    [(print, [], InvalidValueError, "nothing to calibrate on"), (3, [1.0], InvalidTypeError, "cannot be called")],
)
def test_no_batches_and_no_function_are_told(step: Any, batches: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        calibrate(step, batches, "mixed_float16")


@given(st.lists(st.text(alphabet="ab[]*?'_0", min_size=1, max_size=4), min_size=1, max_size=4))
def test_a_pattern_matches_its_own_place_and_no_other(path: list[str]) -> None:
    rule = Rule(observation(ACTIVATION, "/".join(path), 1.0, name="exp").pattern, "full")
    assert rule.matches("exp", "/".join(path))
    assert not rule.matches("exp", "/".join([*path[:-1], path[-1] + "x"]))
    assert not rule.matches("log", "/".join(path))


@pytest.mark.parametrize("where", ["a//b", "/b", "a/./b"])
def test_a_pattern_has_no_blank_component(where: str) -> None:
    pattern = observation(ACTIVATION, where, 1.0, name="exp").pattern
    assert policy("mixed_float16", rules={pattern: "full"}).rules[0].pattern == "b/exp"
