"""What comes before the flow rule's classes: constants that a format cannot hold, narrow ranges, the user's rules."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyamp.flow import TABLE, Decision, Value, constant, decide, flow, integers, largest_integer, table
from polyamp.formats import FORMATS
from polyamp.operations import CLASSES, OPERATIONS
from polyamp.rules import Rule, unused
from support.flow_cases import (
    COMPUTE,
    INPUT,
    LOW,
    MIXES,
    STRONG,
    TOO_LARGE,
    WEAK,
    Mix,
    any_unfit,
    by_table,
    of_class,
    states,
)

# --- constants that the compute format cannot hold --------------------------------------------------------------------


@pytest.mark.parametrize("op_class", [op_class for op_class in CLASSES if op_class != "keep"])
def test_only_what_moves_values_carries_that_they_do_not_fit(op_class: str) -> None:
    carries = op_class in ("neutral", "promote")
    mixes = [mix for mix in MIXES if "other" not in states(mix)]
    carried = {mix: of_class(op_class, mix).output.unfit for mix in mixes}
    assert carried == {mix: TOO_LARGE if carries and any_unfit(mix) else "" for mix in mixes}


@pytest.mark.parametrize("name", ["where", "broadcast", "reshape", "neg", "pad", "mul", "concat", "stack", "scatter"])
def test_a_constant_is_followed_through_what_moves_or_multiplies_it(name: str) -> None:
    unfit = constant([1e9], "float16")
    moved = by_table(name, unfit, WEAK).output
    assert moved.unfit == unfit.unfit
    for outcome in (by_table("add", LOW, moved), by_table("matmul", moved, WEAK)):
        assert (outcome.format, outcome.reason) == ("float32", "constant 1e+09 is beyond float16")
    again = by_table("where", LOW, moved)
    assert (again.format, again.output.unfit) == ("float32", unfit.unfit)


@pytest.mark.parametrize("name", ["tanh", "add", "exp", "matmul", "softmax", "my_kernel"])
def test_a_constant_is_not_followed_through_other_work(name: str) -> None:
    assert by_table(name, constant([1e9], "float16")).output.unfit == ""


@pytest.mark.parametrize(
    ("compute", "fill", "format_name"),
    [
        ("float16", -math.inf, "float16"),
        ("float16", -1e4, "float16"),
        ("float16", -1e9, "float32"),
        ("bfloat16", -1e9, "bfloat16"),
        ("bfloat16", float(np.finfo("float32").min), "float32"),
    ],
)
@pytest.mark.parametrize("way", ["where", "mul", "concat"])
def test_a_mask_that_does_not_fit_raises_the_scores_and_not_the_products(
    way: str, compute: str, fill: float, format_name: str
) -> None:
    def run(name: str, *inputs: Value) -> Decision:
        return by_table(name, *inputs, compute=compute)

    scores = run("matmul", WEAK, WEAK).output
    spread = run("broadcast", constant([fill], compute)).output
    masked = run("where", scores, spread) if way == "where" else run("add", scores, run(way, WEAK, spread).output)
    weights = run("softmax", masked.output)
    assert masked.format == format_name
    assert weights.output == Value("strong", "softmax")
    assert run("matmul", weights.output, WEAK).format == compute


@pytest.mark.parametrize(
    ("magnitude", "fits"),
    [
        (0.0, COMPUTE),
        (-0.0, COMPUTE),
        (-1.0, COMPUTE),
        (1e-5, COMPUTE),
        (65504.0, COMPUTE),
        (math.inf, COMPUTE),
        (-math.inf, COMPUTE),
        (math.nan, COMPUTE),
        (65505.0, ["bfloat16"]),  # beyond is beyond, although rounding would bring it back
        (-1e9, ["bfloat16"]),
        (1e-6, ["bfloat16"]),  # a subnormal of two digits
        (1e-8, ["bfloat16"]),
        (float(np.finfo("float32").min), []),  # masks are often filled with it
        (1e-40, []),
    ],
)
def test_constants_that_a_format_holds(magnitude: float, fits: list[str]) -> None:
    assert [name for name in COMPUTE if constant([magnitude], name) == WEAK] == fits


def rounded(value: float, name: str) -> float:
    """To the nearest number of a 16-bit format, as the hardware does: ties to even."""
    if name == "float16":
        return float(np.float16(value))
    bits = int(np.float32(value).view(np.uint32))
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(np.uint32(bits).view(np.float32))


floats = st.one_of(st.floats(width=32), *(st.floats(-small, small, width=32) for small in (2.0**-13, 2.0**-125)))


@given(st.sampled_from(COMPUTE), floats)
def test_what_is_held_is_what_rounding_keeps(name: str, value: float) -> None:
    beyond = math.isfinite(value) and abs(value) > FORMATS[name].max
    kept = not math.isfinite(value) or (not beyond and abs(rounded(value, name) - value) <= abs(value) / 256)
    becomes_one = abs(value) != 1 and not beyond and abs(rounded(value, name)) == 1
    assert FORMATS[name].holds(value) == (kept and not becomes_one)


@pytest.mark.parametrize(
    ("magnitudes", "says"),
    [
        ([], ""),
        ([1.0, 0.0, math.inf], ""),
        ([1.0, 1e6, 1e-9], "constant 1e+06 is beyond float16"),
        ([-123456.0], "constant -1.235e+05 is beyond float16"),
        ([1e-8], "constant 1e-08 is lost in float16"),
        ([-1e-8], "constant -1e-08 is lost in float16"),
        (np.array([0.5, 7e4], "float32"), "constant 7e+04 is beyond float16"),
    ],
    ids=str,
)
@pytest.mark.parametrize("compute", ["float16", "half"])
def test_of_several_magnitudes_the_first_that_does_not_fit_is_named(
    magnitudes: list[float], says: str, compute: str
) -> None:
    assert constant(iter(magnitudes), compute) == Value(unfit=says)


# --- operations that leave a narrow range -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compute", "raised"),
    [
        ("float16", {"integer_pow"}),
        ("float8_e5m2", {"integer_pow"}),
        ("float8_e4m3fn", {"integer_pow"}),
        ("bfloat16", set()),
    ],
)
def test_of_what_follows_only_what_leaves_the_range_is_full_in_narrow_formats(compute: str, raised: set[str]) -> None:
    followers = [name for name, entry in OPERATIONS.items() if entry.op_class == "follow"]
    outcomes = {name: by_table(name, LOW, compute=compute) for name in followers}
    assert {name for name, outcome in outcomes.items() if outcome.format != compute} == raised
    for name in raised:
        assert outcomes[name].output == Value("strong", name)
        assert outcomes[name].reason == f"{name} leaves the range of {compute}"


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("inputs", [(), (WEAK,), (LOW,), (STRONG,), (LOW, STRONG)], ids=str)
def test_squares_are_full_in_either_format(inputs: Mix, compute: str) -> None:
    for name in ("square", "squared_difference"):
        expected = Decision(name, "full", TABLE, format="float32", output=Value("strong", name))
        assert by_table(name, *inputs, compute=compute) == expected


# --- rules ------------------------------------------------------------------------------------------------------------

RULED = [name for name, entry in OPERATIONS.items() if entry.op_class != "keep"]
SATURATING = ("sigmoid", "tanh", "erf")
KEPT = [name for name, entry in OPERATIONS.items() if entry.op_class == "keep"]


def test_a_rule_comes_before_the_table_and_the_range() -> None:
    some = ([WEAK], [LOW], [STRONG], [LOW, WEAK], [LOW, STRONG])
    for name, op_class, compute, inputs in itertools.product([*RULED, "my_kernel"], CLASSES, COMPUTE, some):
        ruled = flow(decide([Rule(name, op_class)], name), inputs, compute)
        model = of_class(op_class, inputs, compute)
        if op_class == "inner" and name in SATURATING:  # which take strong values in 16 bits
            continue
        assert (ruled.format, ruled.output.state) == (model.format, model.output.state), (name, op_class, inputs)
        assert ruled.reason == model.reason.replace("'anything'", repr(name)), (name, op_class, inputs)


def test_rules_do_not_reach_what_is_never_touched_and_are_unused_where_they_met_only_that() -> None:
    for name in KEPT:
        for rule in (Rule("*", "lower"), Rule("head", "full")):
            decision = decide([rule, Rule(name, "lower")], name, "model/head")
            assert decision == Decision(name, "keep", TABLE), name
            assert flow(decision, [LOW], "float16") == decision, name
        rules = [Rule(name, "lower"), Rule("head", "full")]
        assert unused(rules, [(name, "model/head")]) == rules, name
        assert unused(rules, [(name, "model/head"), ("add", "model/head")]) == rules[:1], name


# --- integers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("compute", "limit"), [("float16", 2048), ("bfloat16", 256)])
def test_integers_that_the_format_rounds_are_guarded_as_constants_are(compute: str, limit: int) -> None:
    assert integers(INPUT, limit, compute) == INPUT
    exact = integers(INPUT, limit + 1, compute)
    assert exact.unfit == f"integers beyond {limit} are not exact in {compute}"
    moved = by_table("reshape", by_table("mul", exact, WEAK, compute=compute).output, compute=compute).output
    for name in ("matmul", "conv", "add", "mul"):
        assert by_table(name, moved, LOW, compute=compute).format == "float32"
        assert by_table(name, moved, LOW, compute=compute).reason == exact.unfit
    assert by_table("matmul", by_table("exp", moved, compute=compute).output, WEAK, compute=compute).format == compute


@pytest.mark.parametrize("compute", ["float32", "tensorfloat32"])
def test_no_integers_are_guarded_from_formats_that_are_not_low(compute: str) -> None:
    assert integers(WEAK, 1e9, compute) == WEAK


def test_a_table_of_integers_is_exact_and_one_of_floats_is_not() -> None:
    assert table(np.arange(300), "bfloat16").unfit == "integers beyond 256 are not exact in bfloat16"
    assert table(np.arange(257), "bfloat16") == table(np.arange(300.0), "bfloat16") == Value(role="table")
    assert table(np.array(300), "bfloat16") == WEAK  # one factor for all


@pytest.mark.parametrize(
    ("operation", "inputs", "largest"),
    [
        ("reshape", [100], 100),
        ("cast", [100], 100),
        ("concat", [100, 7], 100),
        ("sub", [100, 7], 107),
        ("mul", [100, 7], 700),
        ("floor_div", [100, 0], 1000),
        ("floor_div", [0, 0], 0),  # of sizes
        ("add", [900, 900], 1000),
        ("argmax", [], 1000),
    ],
)
def test_integers_are_as_large_as_what_they_are_made_of(operation: str, inputs: list[float], largest: float) -> None:
    assert largest_integer(operation, inputs, 1000) == largest
