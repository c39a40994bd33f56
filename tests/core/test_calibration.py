"""What records say for and against 16 bits: the evidence behind each rule of a calibration."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyamp import policy
from polyamp.diagnosis.calibrate import (
    Calibration,
    Evidence,
    calibrate,
    changed,
    merged,
    overflowing,
    too_narrow,
    without_a_scale,
)
from polyamp.diagnosis.probe import Probe
from polyamp.diagnosis.recording import ACTIVATION, GRADIENT, PARAMETER, Kind, Observation, Recording
from polyamp.diagnosis.spread import Spread
from polyamp.errors import InvalidTypeError, InvalidValueError
from polyamp.flow import Rule


def seen(
    where: str,
    name: str,
    *values: float,
    kind: Kind = ACTIVATION,
    op_class: str = "lower",
    fmt: str = "float16",
) -> Observation:
    return Observation(kind, name, name, where, op_class, fmt, (len(values),), Spread.of(values))


def full(where: str, name: str, *values: float, kind: Kind = ACTIVATION) -> Observation:
    return seen(where, name, *values, kind=kind, op_class="full", fmt="float32")


def recording(*observations: Observation, widened: bool = True) -> Recording:
    return Recording("torch", "mixed_float16", 1.0, 1.0, widened, observations)


def probed(*observations: Observation, fmt: str = "float16") -> Probe:
    return Probe(recording(*observations), fmt)


def rules(evidence: object) -> dict[str, str]:
    return {one.rule: one.op_class for one in evidence}  # type: ignore[attr-defined]


def test_what_is_beyond_the_format_stays_in_float32() -> None:
    found = list(overflowing(probed(seen("a", "matmul", 1.0, 65504.0), seen("b", "matmul", 1.0, 65505.0))))
    assert rules(found) == {"b/matmul": "full"}
    assert (found[0].largest, found[0].was, round(found[0].headroom, 3)) == (65505.0, "lower", -0.0)
    assert "65504" in found[0].why


def test_what_follows_an_overflowing_product_is_left_to_the_flow() -> None:
    found = overflowing(probed(seen("b", "matmul", 1e5), seen("b", "add", 1e5, op_class="follow")))
    assert rules(found) == {"b/matmul": "full"}


def test_what_overflows_by_itself_has_a_rule_of_its_own() -> None:
    assert rules(overflowing(probed(seen("b", "mul", 1e5, op_class="follow")))) == {"b/mul": "full"}


def test_what_float32_computes_and_what_is_never_touched_has_none() -> None:
    assert not rules(overflowing(probed(full("b", "exp", 1e9), seen("b", "mine", 1e9, op_class="keep"))))


@pytest.mark.parametrize(("tiny", "rule"), [(99, {"b/matmul": "full"}), (1, {})])
def test_what_is_lost_is_judged_by_its_share_of_the_mass(tiny: int, rule: dict[str, str]) -> None:
    values = [2.0**-27] * tiny + [2.0**-24] * (100 - tiny)
    assert rules(too_narrow(probed(seen("b", "matmul", *values)), 0.01)) == rule


def test_the_first_that_is_not_finite_in_its_own_format_has_an_input_that_is_too_large() -> None:
    probe = probed(full("a", "mul", 1e6), seen("b", "matmul", 3.0), seen("c", "matmul", 1.0))
    narrow = recording(full("a", "mul", 1e6), seen("b", "matmul", math.inf), seen("c", "matmul", math.nan))
    assert rules(changed(probe, narrow)) == {"b/matmul": "full"}


@pytest.mark.parametrize("bad", [full("b", "matmul", math.inf), seen("b", "matmul", 1.0)])
def test_float32_results_that_are_not_finite_are_not_the_formats_doing(bad: Observation) -> None:
    assert not rules(changed(probed(seen("b", "matmul", 3.0)), recording(bad)))


def rounded(where: str, name: str, *values: float, kind: Kind = ACTIVATION) -> Observation:
    """A float32 result that the next operation takes in 16 bits."""
    return seen(where, name, *values, kind=kind, op_class="full")


def test_a_rule_for_what_is_float32_already_would_not_help() -> None:
    probe = probed(rounded("a", "matmul", 1e5, 2.0**-30), seen("b", "matmul", 1.0))
    assert not rules([*overflowing(probe), *too_narrow(probe, 0.0)])
    narrow = recording(rounded("a", "matmul", math.inf), seen("b", "matmul", math.nan))
    assert rules(changed(probe, narrow)) == {"b/matmul": "full"}


def test_a_gradient_that_is_rounded_is_of_the_product_before() -> None:
    tiny = rounded("loss", "cross_entropy", 2.0**-45, kind=GRADIENT)
    probe = probed(*LAYERS, full("loss", "cross_entropy", 1.0), tiny, *gradients(8, 8, 8))
    assert rules(without_a_scale(probe)) == {"layer/4/matmul": "full"}


LAYERS = [seen(f"layer/{index}", "matmul", 1.0) for index in range(5)]


def gradients(*powers: int) -> list[Observation]:
    return [seen(f"layer/{index}", "matmul", 2.0**power, kind=GRADIENT) for index, power in enumerate(powers)]


@pytest.mark.parametrize(
    ("powers", "places"),
    [
        ((-40, -40, 8, -40, -40), {"layer/2/matmul"}),
        ((8, 8, -40, 8, 8), {"layer/2/matmul"}),
        ((8, 8, -40, -40, 8), {"layer/2/matmul", "layer/3/matmul"}),
    ],
)
def test_the_fewest_gradients_leave_16_bits(powers: tuple[int, ...], places: set[str]) -> None:
    assert rules(without_a_scale(probed(*LAYERS, *gradients(*powers)))).keys() == places


def test_a_parameters_gradient_is_of_the_operation_at_its_path() -> None:
    large = seen("", "layer.2.weight", 2.0**8, kind=PARAMETER)
    assert rules(without_a_scale(probed(*LAYERS, *gradients(-40, -40), large))).keys() == {"layer/2/matmul"}


@given(st.lists(st.integers(-60, 12), min_size=5, max_size=5))
def test_without_those_gradients_a_scale_serves(powers: list[int]) -> None:
    probe = Probe(recording(*LAYERS, *gradients(*powers)), "float16")
    left_out = rules(without_a_scale(probe))
    assert probe.window is not None
    assert bool(left_out) == probe.window.is_empty
    rest = [one for one in probe.recording.observations if one.kind == ACTIVATION or one.place not in left_out]
    after = Probe(recording(*rest), "float16").window
    assert after is None or not after.is_empty


@given(st.lists(st.text(alphabet="ab[]*?'_0", min_size=1, max_size=4), min_size=1, max_size=4))
def test_a_pattern_matches_its_own_place_and_no_other(path: list[str]) -> None:
    rule = Rule(seen("/".join(path), "exp", 1.0).pattern, "full")
    assert rule.matches("exp", "/".join(path))
    assert not rule.matches("exp", "/".join([*path[:-1], path[-1] + "x"]))
    assert not rule.matches("log", "/".join(path))


@pytest.mark.parametrize("where", ["a//b", "/b", "a/./b"])
def test_a_pattern_has_no_blank_component(where: str) -> None:
    assert policy("mixed_float16", rules={seen(where, "exp", 1.0).pattern: "full"}).rules[0].pattern == "b/exp"


def test_batches_are_merged_tensor_by_tensor() -> None:
    one = recording(seen("", "matmul", 1.0), seen("", "matmul", 8.0))
    two = recording(seen("", "matmul", 4.0, 4.0), seen("", "matmul", 2.0), seen("b", "matmul", 2.0))
    both = merged([one, two]).observations
    assert [(each.place, each.spread.elements, each.spread.largest) for each in both] == [
        ("matmul", 3, 4.0),
        ("matmul", 2, 8.0),
        ("b/matmul", 1, 2.0),
    ]


def test_batches_of_another_loss_scale_are_unscaled() -> None:
    scaled = Recording("torch", "mixed_float16", 1.0, 8.0, True, (seen("a", "matmul", 8.0, kind=GRADIENT),))
    (gradient,) = merged([scaled, recording(seen("a", "matmul", 1.0, kind=GRADIENT))]).observations
    assert (gradient.spread.elements, gradient.spread.largest) == (2, 1.0)


FOUND = Evidence("b/matmul", "full", "b/matmul", "lower", "1e+05 is beyond float16", 1e5, 0.0, -0.6, 3)
CALIBRATION = Calibration(
    policy("mixed_float16", rules={"b/matmul": "full"}),
    (FOUND,),
    3,
    probed(seen("b", "matmul", 1e5), *gradients(-10)),
    probed(full("b", "matmul", 1e5), *gradients(-10)),
)


def test_it_prints_the_evidence_and_the_rules_to_paste() -> None:
    assert str(CALIBRATION).splitlines() == [
        "torch, mixed_float16: 3 batches, 1 rule to add",
        "",
        "rule      class  was     amax  L1 lost   headroom  why",
        "b/matmul  full   lower  1e+05     0.0%  -0.6 bits  1e+05 is beyond float16",
        "",
        "rules={",
        '    "b/matmul": "full",',
        "}",
        "",
        "safe loss scales: none, the forward pass overflows; with the rules: 2^-15 .. 2^22",
    ]
    assert CALIBRATION.is_safe


def test_it_is_json(tmp_path: object) -> None:
    saved = json.loads(json.dumps(CALIBRATION.as_dict(), allow_nan=False))
    assert saved["rules"] == CALIBRATION.rules == {"b/matmul": "full"}
    assert saved["evidence"][0]["batches"] == 3
    assert (saved["before"]["safe"], saved["after"]["safe"]) == (False, True)


@pytest.mark.parametrize("options", [{"share": -0.1}, {"share": 2}, {"margin": -1}, {"margin": "a"}, {"share": True}])
def test_settings_outside_of_their_range_are_told(options: dict[str, float]) -> None:
    with pytest.raises(InvalidValueError, match=f"invalid {next(iter(options))}"):
        calibrate(lambda x: x, [(1.0,)], "mixed_float16", **options)


def test_no_batches_and_no_function_are_told() -> None:
    with pytest.raises(InvalidValueError, match="nothing to calibrate on"):
        calibrate(lambda x: x, [], "mixed_float16")
    with pytest.raises(InvalidTypeError, match="cannot be called"):
        calibrate(3, [(1.0,)], "mixed_float16")
