"""Rules: what a pattern matches, which one decides, and what is refused."""

from typing import Any

import pytest

import polyamp
from polyamp.flow import decide
from polyamp.operations import OPERATIONS
from polyamp.rules import Rule, parse_rules, unused


@pytest.mark.parametrize(
    ("pattern", "operation", "path"),
    [
        ("softmax", "softmax", ""),
        ("softmax", "softmax", "model/head"),
        ("*_norm", "layer_norm", ""),
        ("?og", "log", ""),
        ("head", "add", "model/head"),
        ("head", "add", "head/1"),
        ("decoder.*.norm", "add", "model/decoder/3/norm"),
        ("decoder/*/norm", "add", "decoder.3.norm.inner"),
        ("layer_[0-3]", "add", "model.layer_2.mlp"),
        ("a/b", "add", "x/a/b/y"),
    ],
)
def test_matches(pattern: str, operation: str, path: str) -> None:
    assert Rule(pattern, "full").matches(operation, path)


@pytest.mark.parametrize(
    ("pattern", "operation", "path"),
    [
        ("softmax", "log_softmax", ""),
        ("norm", "layer_norm", "model/layer_norm"),  # a bare word is a whole component
        ("head", "add", "model/header"),
        ("decoder.*.norm", "add", "decoder/norm"),  # * is one component
        ("decoder.*.norm", "add", "decoder/3/4/norm"),
        ("a/b", "add", "a/x/b"),
        ("a/b", "add", "b"),
        ("Head", "add", "head"),  # names are case-sensitive, as Python's are
        ("x/softmax", "softmax", ""),  # an operation's name is no path
    ],
)
def test_does_not_match(pattern: str, operation: str, path: str) -> None:
    assert not Rule(pattern, "full").matches(operation, path)


def test_the_table_decides_where_no_rule_does() -> None:
    for operation, entry in OPERATIONS.items():
        assert decide((Rule("nothing", "lower"),), operation, "some/where")[1:3] == (entry.op_class, "table"), operation


def test_the_first_rule_that_matches_decides() -> None:
    rules = parse_rules({"head": "full", "matmul": "neutral", "*": "lower"})
    assert decide(rules, "matmul", "model/head")[1:3] == ("full", "rule 'head'")
    assert decide(rules, "matmul", "model/body")[1:3] == ("neutral", "rule 'matmul'")
    assert decide(rules, "softmax", "model/body")[1:3] == ("lower", "rule '*'")


def test_unknown_operations_run_as_written() -> None:
    decision = decide((), "my_kernel", "model")
    assert decision.op_class == "keep"
    assert "unknown" in decision.reason
    assert decide((Rule("my_kernel", "lower"),), "my_kernel").op_class == "lower"


@pytest.mark.parametrize(
    ("path", "matches"),
    [("model/decoder/3", True), ("decoder/3", True), ("decoder/3/norm", False), ("decoder/4", False), ("3", False)],
)
def test_a_pattern_that_ends_in_an_operation_is_about_that_one_there(path: str, matches: bool) -> None:
    rule = Rule("decoder.3.exp", "full")
    assert rule.matches("exp", path) is matches
    assert not rule.matches("add", path)
    assert rule.matches("add", f"{path}/exp") is (path in ("model/decoder/3", "decoder/3"))  # a module of that name


def test_rules_that_matched_nothing_are_found() -> None:
    rules = parse_rules({"softmax": "lower", "decoder.*": "full", "encoder": "full"})
    assert unused(rules, [("softmax", "encoder/1"), ("add", "my_decoder")]) == [Rule("decoder.*", "full")]


@pytest.mark.parametrize(
    "spec", [{"softmax": "lower", "head": "full"}, [("softmax", "lower"), ("head", "full")]], ids=str
)
def test_rules_keep_the_order_they_are_written_in(spec: Any) -> None:
    assert parse_rules(spec) == (Rule("softmax", "lower"), Rule("head", "full"))


@pytest.mark.parametrize(
    "spec", ["softmax", 3, {"softmax": None}, {3: "lower"}, [("softmax",)], [("a", "full", "b")]], ids=str
)
def test_rules_of_a_wrong_type_are_refused(spec: Any) -> None:
    with pytest.raises(polyamp.errors.InvalidTypeError, match="rules"):
        parse_rules(spec)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"": "full"}, "blank"),
        ({"decoder..norm": "full"}, "blank"),
        ({"head/": "full"}, "blank"),
        ({"softmax": "half"}, "unknown class"),
        ([("softmax", "full"), ("softmax", "lower")], "appears twice"),
    ],
    ids=str,
)
def test_wrong_rules_are_refused(spec: Any, says: str) -> None:
    with pytest.raises(polyamp.errors.InvalidValueError, match=says):
        parse_rules(spec)
