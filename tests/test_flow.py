"""The flow rule: every class under every mix of inputs, against the rule's own sentences; guards and reasons."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyamp import FORMATS
from polyamp.flow import AS_WRITTEN, STATES, Flow, Value, constant, flow
from polyamp.operations import CLASSES, OPERATIONS
from polyamp.rules import TABLE, Decision, Rule, decide

COMPUTE = ["float16", "bfloat16"]
KNOWN = {
    "weak": Value(),
    "low": Value("low", "matmul"),
    "strong": Value("strong", "exp"),
    "other": Value("other", "float64"),
    "unfit": Value(unfit="constant 1e+30 is beyond it"),
}
MIXES = [mix for count in range(4) for mix in itertools.product(KNOWN, repeat=count)]


def decided(op_class: str, mix: tuple[str, ...], compute: str = "float16", operation: str = "anything") -> Flow:
    return flow(operation, Decision(op_class, "rule 'anything'"), [KNOWN[name] for name in mix], compute)


def expected(op_class: str, mix: tuple[str, ...]) -> tuple[str, str]:
    """Format and state of the output as the contract's sentences have them, one after the other."""
    if op_class == "keep" or "other" in mix:
        return AS_WRITTEN, "strong" if {"strong", "other"} & set(mix) else "weak"
    if op_class == "full":
        return "float32", "strong"
    if op_class == "lower":
        return ("float32", "strong") if "unfit" in mix else ("float16", "low")
    if "strong" in mix or ("unfit" in mix and op_class == "follow"):
        return "float32", "strong"
    if "low" in mix and "unfit" in mix:
        return "float32", "weak" if op_class == "promote" else "strong"
    if "low" in mix:
        return ("float32", "weak") if op_class == "promote" and "weak" in mix else ("float16", "low")
    return "float32", "weak"


@pytest.mark.parametrize("op_class", CLASSES)
def test_every_class_under_every_mix_of_up_to_three_inputs(op_class: str) -> None:
    found = {mix: (outcome.format, outcome.output.state) for mix in MIXES for outcome in [decided(op_class, mix)]}
    assert found == {mix: expected(op_class, mix) for mix in MIXES}


@pytest.mark.parametrize("op_class", CLASSES)
@pytest.mark.parametrize("mix", [mix for mix in MIXES if len(mix) == 3])
def test_the_order_of_inputs_changes_no_format(op_class: str, mix: tuple[str, ...]) -> None:
    orders = {
        decided(op_class, order)[0] + decided(op_class, order).output.state for order in itertools.permutations(mix)
    }
    assert len(orders) == 1


values = st.sampled_from(list(KNOWN.values()))


@given(st.sampled_from(sorted(OPERATIONS)), st.lists(values, max_size=4), st.sampled_from(COMPUTE))
def test_every_operation_of_the_table_is_decided_with_a_reason(name: str, inputs: list[Value], compute: str) -> None:
    outcome = flow(name, decide((), name), inputs, compute)
    assert outcome.format in (compute, "float32", AS_WRITTEN)
    assert outcome.output.state in STATES
    assert outcome.reason
    assert outcome == flow(name, decide((), name), list(inputs), compute)


@given(st.sampled_from(["follow", "neutral"]), st.lists(values, min_size=1, max_size=4))
def test_float32_by_declaration_raises_nothing(op_class: str, inputs: list[Value]) -> None:
    """The promise that one float32 bias or constant does not turn what comes after it back to float32."""
    decision = Decision(op_class, TABLE)
    with_bias = flow("anything", decision, [*inputs, Value()], "float16")
    assert with_bias.format == flow("anything", decision, inputs, "float16").format


@given(st.sampled_from([name for name in CLASSES if name not in ("lower", "keep")]), st.lists(values, max_size=3))
def test_only_lower_work_leaves_float32_after_full_work(op_class: str, inputs: list[Value]) -> None:
    outcome = flow("anything", Decision(op_class, TABLE), [KNOWN["strong"], *inputs], "bfloat16")
    assert outcome.format != "bfloat16"
    assert outcome.output.state == "strong"


@pytest.mark.parametrize("name", ["where", "broadcast", "mul"])
def test_a_constant_is_followed_through_what_moves_or_multiplies_it(name: str) -> None:
    unfit = constant([1e9], "float16")
    moved = flow(name, decide((), name), [unfit, Value()], "float16").output
    assert moved.unfit == unfit.unfit
    added = flow("add", decide((), "add"), [Value("low", "matmul"), moved], "float16")
    assert (added.format, added.reason) == ("float32", "constant 1e+09 is beyond float16")
    assert flow("matmul", decide((), "matmul"), [moved], "float16").format == "float32"


def test_a_constant_is_not_followed_through_other_work() -> None:
    assert flow("tanh", decide((), "tanh"), [constant([1e9], "float16")], "float16").output.unfit == ""


@pytest.mark.parametrize(
    ("magnitude", "fits"),
    [
        (0.0, COMPUTE),
        (-1.0, COMPUTE),
        (1e-5, COMPUTE),
        (65504.0, COMPUTE),
        (float("inf"), COMPUTE),
        (float("-inf"), COMPUTE),
        (float("nan"), COMPUTE),
        (65536.0, ["bfloat16"]),
        (1e-8, ["bfloat16"]),
        (-1e9, ["bfloat16"]),
        (-3.4028234663852886e38, []),  # the lowest float32, which masks are often filled with
        (1e-40, []),
    ],
)
def test_constants_that_a_format_holds(magnitude: float, fits: list[str]) -> None:
    assert [name for name in COMPUTE if not constant([magnitude], name).unfit] == fits


@given(st.floats(allow_nan=False, allow_infinity=False, width=32), st.sampled_from(COMPUTE))
def test_what_is_held_is_within_the_rounding_error_of_bfloat16(value: float, name: str) -> None:
    target = FORMATS[name]
    magnitude = abs(value)
    inside = magnitude == 0 or target.smallest_normal <= magnitude <= target.max
    if inside:
        assert target.holds(value)
    if magnitude > target.max or 0 < magnitude < target.smallest_subnormal / 4:
        assert not target.holds(value)


@pytest.mark.parametrize(
    ("name", "inputs", "reason"),
    [
        ("matmul", ["weak"], "table"),
        ("exp", ["low"], "table"),
        ("add", ["low", "weak"], "beside matmul"),
        ("add", ["low", "strong"], "after exp"),
        ("add", ["weak", "weak"], "as declared"),
        ("concat", ["low", "weak"], "its widest input is float32"),
        ("add", ["weak", "other"], "an input is float64"),
        ("matmul", ["low", "unfit"], "constant 1e+30 is beyond it"),
        ("my_kernel", ["low"], "unknown operation: runs as written"),
    ],
)
def test_reasons_name_what_decided(name: str, inputs: list[str], reason: str) -> None:
    assert flow(name, decide((), name), [KNOWN[state] for state in inputs], "float16").reason == reason


def test_a_rule_is_the_reason_where_it_decided() -> None:
    decision = decide([Rule("softmax", "lower")], "softmax")
    assert flow("softmax", decision, [Value()], "float16") == Flow("float16", Value("low", "softmax"), "rule 'softmax'")


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("op_class", ["", "follow"])
def test_what_leaves_a_narrow_range_is_full_there_unless_a_rule_says_otherwise(compute: str, op_class: str) -> None:
    rules = [Rule("integer_pow", op_class)] if op_class else []
    outcome = flow("integer_pow", decide(rules, "integer_pow"), [KNOWN["low"]], compute)
    assert outcome.format == ("float32" if compute == "float16" and not op_class else compute)
