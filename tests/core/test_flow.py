"""The flow rule: every class under every mix of inputs, against the rule's own sentences; properties; reasons."""

import itertools
import re
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from polyamp.flow import AS_WRITTEN, Value, decide, flow
from polyamp.operations import CLASSES, OPERATIONS
from polyamp.rules import Rule
from support.flow_cases import (
    COMPUTE,
    INPUT,
    KNOWN,
    LOW,
    MIXES,
    OTHER,
    STRONG,
    TOO_LARGE,
    UNFIT,
    WEAK,
    any_unfit,
    by_table,
    of_class,
    states,
)

values = st.sampled_from(KNOWN)


# --- the contract: sentences that are true of every mix of inputs, and that leave none out ----------------------------


class Sentence(NamedTuple):
    """For which classes, under which states and beside what constants, an output has which state."""

    classes: str
    when: Callable[[set[str], bool], bool]  # of the inputs' states, and whether one of them does not fit
    output: str
    as_written: bool = False


def undisturbed(states: set[str]) -> bool:
    return not states & {"strong", "other"}


def declared(states: set[str]) -> bool:
    return states <= {"weak", "input"}


CONTRACT = {
    "what the user gave another type stays so": Sentence(
        " ".join(CLASSES), lambda states, unfit: "other" in states, "strong", as_written=True
    ),
    "kept operations run as written, after full work too": Sentence(
        "keep", lambda states, unfit: "strong" in states and "other" not in states, "strong", as_written=True
    ),
    "kept operations make no state of their own": Sentence(
        "keep", lambda states, unfit: undisturbed(states) and "input" not in states, "weak", as_written=True
    ),
    "kept operations hand the user's data on": Sentence(
        "keep", lambda states, unfit: undisturbed(states) and "input" in states, "input", as_written=True
    ),
    "full makes strong": Sentence("full", lambda states, unfit: "other" not in states, "strong"),
    "lower makes low, of strong values too": Sentence(
        "lower", lambda states, unfit: "other" not in states and not unfit, "low"
    ),
    "lower is float32 of what the format cannot hold": Sentence(
        "lower", lambda states, unfit: "other" not in states and unfit, "strong"
    ),
    "float32 after any strong": Sentence(
        "follow neutral promote", lambda states, unfit: "strong" in states and "other" not in states, "strong"
    ),
    "the user's data stay float32 beside low values": Sentence(
        "follow neutral promote", lambda states, unfit: undisturbed(states) and {"low", "input"} <= states, "strong"
    ),
    "else low after any low": Sentence(
        "follow neutral",
        lambda states, unfit: undisturbed(states) and "low" in states and "input" not in states and not unfit,
        "low",
    ),
    "the user's data alone stay what they are": Sentence(
        "follow", lambda states, unfit: declared(states) and "input" in states and not unfit, "input"
    ),
    "the user's data are moved as they are": Sentence(
        "neutral promote", lambda states, unfit: declared(states) and "input" in states, "input"
    ),
    "else as declared": Sentence("follow", lambda states, unfit: states <= {"weak"} and not unfit, "weak"),
    "a constant alone may be moved as declared": Sentence(
        "neutral promote", lambda states, unfit: states <= {"weak"}, "weak"
    ),
    "arithmetic on what the format cannot hold is float32": Sentence(
        "follow", lambda states, unfit: "other" not in states and unfit, "strong"
    ),
    "what the format cannot hold raises low values beside it": Sentence(
        "neutral", lambda states, unfit: undisturbed(states) and "low" in states and unfit, "strong"
    ),
    "the widest of low inputs is low": Sentence(
        "promote", lambda states, unfit: states == {"low"} and not unfit, "low"
    ),
    "the widest of low and declared inputs is as declared": Sentence(
        "promote", lambda states, unfit: states == {"low", "weak"}, "weak"
    ),
    "not even low values are low that do not fit": Sentence(
        "promote", lambda states, unfit: states == {"low"} and unfit, "strong"
    ),
}


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize(
    ("says", "op_class"), [(says, op_class) for says in CONTRACT for op_class in CONTRACT[says].classes.split()]
)
def test_the_contract_under_every_mix_of_up_to_three_inputs(says: str, op_class: str, compute: str) -> None:
    sentence = CONTRACT[says]
    own_format = compute if sentence.output == "low" else "float32"
    expected = (AS_WRITTEN if sentence.as_written else own_format, sentence.output)
    found = {
        mix: (outcome.format, outcome.output.state)
        for mix in MIXES
        if sentence.when(states(mix), any_unfit(mix))
        for outcome in [of_class(op_class, mix, compute)]
    }
    assert found
    assert {mix: what for mix, what in found.items() if what != expected} == {}


@pytest.mark.parametrize("op_class", sorted(CLASSES.keys() - {"inner"}))
def test_the_contract_speaks_of_every_mix(op_class: str) -> None:
    about = [sentence for sentence in CONTRACT.values() if op_class in sentence.classes.split()]
    assert [mix for mix in MIXES if not any(sentence.when(states(mix), any_unfit(mix)) for sentence in about)] == []


# --- inner: decided by its first input --------------------------------------------------------------------------------


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize(
    ("first", "format_name", "state"),
    [
        ("low", "compute", "low"),
        ("strong", "float32", "low"),
        ("weak", "float32", "weak"),
        ("input", "float32", "weak"),
        ("other", AS_WRITTEN, "strong"),
    ],
)
def test_inner_is_low_beside_low_data_and_after_full_work(
    first: str, format_name: str, state: str, compute: str
) -> None:
    for mix in (mix for mix in MIXES if mix and mix[0].state == first and not any_unfit(mix)):
        if first != "other" and "other" in states(mix):
            continue
        outcome = of_class("inner", mix, compute)
        assert (outcome.format, outcome.output.state) == (format_name.replace("compute", compute), state), mix


def test_inner_is_float32_of_what_the_format_cannot_hold() -> None:
    assert of_class("inner", [LOW, UNFIT]).format == "float32"
    assert of_class("inner", [LOW, UNFIT]).output.state == "strong"


@pytest.mark.parametrize("name", ["sigmoid", "tanh", "erf"])
def test_what_saturates_takes_strong_values_in_16_bits_since_inf_is_a_fine_argument_of_it(name: str) -> None:
    assert by_table(name, STRONG).format == "float16"
    assert by_table("layer_norm", STRONG).format == "float32"


def test_an_average_is_as_large_as_its_data() -> None:
    """As of squares, of which a variance is made: 16 bits would make it inf, and its difference nothing."""
    assert by_table("avg_pool", LOW).output.state == "low"
    assert by_table("avg_pool", STRONG).output == STRONG
    assert by_table("avg_pool", INPUT).output.state == "input"
    assert by_table("avg_pool", WEAK).output.state == "weak"


# --- properties -------------------------------------------------------------------------------------------------------


@given(st.sampled_from(["follow", "neutral"]), st.lists(values, max_size=5), st.integers(0, 5))
def test_float32_by_declaration_raises_nothing(op_class: str, inputs: list[Value], place: int) -> None:
    """The promise that one float32 bias or constant does not turn what comes after it back to float32."""
    with_bias = of_class(op_class, [*inputs[:place], WEAK, *inputs[place:]])
    assert with_bias == of_class(op_class, inputs)


@given(st.sampled_from(sorted(OPERATIONS)), st.lists(values, max_size=5), st.sampled_from(COMPUTE))
def test_it_is_pure(name: str, inputs: list[Value], compute: str) -> None:
    given_inputs, decision = list(inputs), decide((), name)
    first = flow(decision, inputs, compute)
    assert inputs == given_inputs
    assert first == flow(decision, tuple(inputs), compute)


@pytest.mark.once
@pytest.mark.parametrize("compute", COMPUTE)
def test_every_operation_is_decided_under_every_mix_with_a_reason(compute: str) -> None:
    for name, mix in itertools.product([*OPERATIONS, "my_kernel"], MIXES):
        outcome = by_table(name, *mix, compute=compute)
        assert outcome.format in (compute, "float32", AS_WRITTEN), (name, mix)
        assert outcome.output.state in ("weak", "input", "low", "strong"), (name, mix)
        assert outcome.reason, (name, mix)


programs = st.lists(
    st.tuples(st.sampled_from([*OPERATIONS, "my_kernel"]), st.lists(st.integers(0, 30), min_size=1, max_size=3)),
    max_size=12,
)


@given(programs, st.sampled_from(COMPUTE))
@example([("matmul", [0]), ("concat", [0, 4])], "float16")
def test_in_any_program_a_state_comes_from_work_that_makes_it(
    program: list[tuple[str, list[int]]], compute: str
) -> None:
    known, lowered, raised = [WEAK, UNFIT, OTHER, INPUT], {""}, {"a constant", "float64", "an input"}
    joined = {""}  # to a parameter or a constant
    for name, places in program:
        inputs = [known[place % len(known)] for place in places]
        outcome = by_table(name, *inputs, compute=compute)
        op_class = decide((), name).op_class
        lowered |= {name} if op_class in ("lower", "inner") else set()
        raised |= {name} if op_class == "full" or name == "integer_pow" else set()
        joined |= {name} if op_class == "promote" else set()
        makers = {"weak": joined, "input": {""}, "low": lowered - {""}, "strong": raised}
        assert outcome.output.maker in makers[outcome.output.state]
        neighbour = re.fullmatch("(?:bounded, )?(?:after|next to) (.+)", outcome.reason)
        assert neighbour is None or neighbour[1] in {value.maker for value in inputs} | {"an input"}
        known.append(outcome.output)


# --- reasons ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "inputs", "reason"),
    [
        ("matmul", [WEAK], "table"),
        ("exp", [LOW], "table"),
        ("add", [LOW, WEAK], "next to matmul"),
        ("add", [WEAK, Value("low", "conv"), LOW], "next to conv"),
        ("reshape", [LOW], "next to matmul"),
        ("add", [LOW, STRONG], "after exp"),
        ("add", [LOW, Value("strong", "sum"), STRONG], "after sum"),
        ("concat", [LOW, STRONG], "after exp"),
        ("add", [LOW, INPUT], "next to an input"),
        ("concat", [INPUT, WEAK, LOW], "next to an input"),
        ("layer_norm", [LOW, WEAK], "next to matmul"),
        ("layer_norm", [STRONG, WEAK], "bounded, after exp"),
        ("add", [WEAK, WEAK], "as declared"),
        ("concat", [LOW, WEAK], "its widest input is float32"),
        ("concat", [LOW, LOW], "next to matmul"),
        ("add", [STRONG, OTHER], "an input is float64"),
        ("cast", [OTHER], "an input is float64"),
        ("cast", [STRONG], "table"),
        ("matmul", [LOW, UNFIT], TOO_LARGE),
        ("add", [STRONG, UNFIT], TOO_LARGE),
        ("where", [LOW, Value(unfit="one"), Value(unfit="two")], "one"),
        ("integer_pow", [LOW], "integer_pow leaves the range of float16"),
        ("my_kernel", [LOW], "unknown operation: runs as written"),
    ],
)
def test_reasons_name_what_decided(name: str, inputs: list[Value], reason: str) -> None:
    assert by_table(name, *inputs).reason == reason


@pytest.mark.parametrize(
    ("op_class", "format_name", "output"),
    [
        ("lower", "float16", Value("low", "softmax")),
        ("full", "float32", Value("strong", "softmax")),
        ("keep", AS_WRITTEN, WEAK),
    ],
)
def test_a_rule_is_the_reason_where_it_decided(op_class: str, format_name: str, output: Value) -> None:
    decision = decide([Rule("soft*", op_class)], "softmax")
    expected = decision._replace(format=format_name, output=output, reason="rule 'soft*'")
    assert flow(decision, [WEAK], "float16") == expected
