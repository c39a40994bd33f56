"""Decisions with a memory."""

from __future__ import annotations

import pytest

import polyamp
from polyamp.deciding import Decider, unused_in
from polyamp.flow import CARRIED, INPUT, WEAK, Value, flow
from polyamp.rules import Rule, decide


def decider(rules: dict[str, str] | None = None, name: str = "mixed_float16") -> Decider:
    return Decider(polyamp.policy(name, rules=rules))


def test_decides_as_the_rules_and_the_flow_rule_do() -> None:
    one = decider({"head/softmax": "lower"})
    for path in ("", "head", "tail"):
        decision = one.decide("softmax", path)
        assert decision == decide(one.policy.rules, "softmax", path)
        for inputs in ([WEAK], [INPUT], [CARRIED], [Value("low", "matmul")]):
            assert one.flow("softmax", decision, inputs) == flow("softmax", decision, inputs, "float16")


@pytest.mark.parametrize("gradient", [False, True])
def test_a_question_is_answered_once(monkeypatch: pytest.MonkeyPatch, gradient: bool) -> None:
    one, asked = decider(), []
    decision = one.decide("exp")
    monkeypatch.setattr("polyamp.deciding.flow", lambda *args, **kwargs: asked.append(kwargs) or flow(*args, **kwargs))
    assert one.flow("exp", decision, [WEAK], gradient=gradient) == one.flow("exp", decision, (WEAK,), gradient=gradient)
    one.flow("exp", decision, [WEAK], gradient=not gradient)
    assert asked == [{"gradient": gradient}, {"gradient": not gradient}]


def test_a_policy_without_rules_does_not_look_at_paths() -> None:
    one = decider()
    assert one.decide("exp", "head") is one.decide("exp", "tail")
    assert list(one.decisions) == [("exp", "")]


def test_default_rules_are_never_unused() -> None:
    assert decider(name="half").unused == []
    assert decider({"exp": "lower"}, "half").unused == [Rule("exp", "lower")]


def test_a_rule_is_unused_where_no_part_has_a_match() -> None:
    rules = {"exp": "lower", "head/*": "full", "tail/*": "full"}
    first, second = decider(rules), decider(rules)
    first.decide("exp", "body")
    second.decide("add", "head")
    assert unused_in([first, second]) == [Rule("tail/*", "full")]
    assert first.unused == [Rule("head/*", "full"), Rule("tail/*", "full")]


def test_constants_are_those_of_the_compute_format() -> None:
    assert decider().constant(1e-8).unfit == "constant 1e-08 is lost in float16"
    assert decider(name="mixed_bfloat16").constant(1e-8) == WEAK
    assert decider().constant() == WEAK


def test_only_what_a_rule_asked_for_is_refused() -> None:
    one = decider({"tanh": "lower"})
    one.refuse("no float16 kernel for Exp on CPU", one.decide("exp"))
    one.refuse("no float16 kernel for Tanh on CPU", one.decide("tanh"))
    assert one.refused == {"no float16 kernel for Tanh on CPU": "rule 'tanh'"}


def test_a_sibling_keeps_its_own_record_until_it_is_taken_over() -> None:
    graph = decider({"tanh": "lower"})
    graph.not_lowered = {"a reason": "first place"}
    function = graph.sibling()
    function.lowered, function.not_lowered = True, {"a reason": "second place", "another": "third place"}
    function.refuse("no kernel", function.decide("tanh"))
    assert (graph.lowered, graph.unused, graph.refused) == (False, [Rule("tanh", "lower")], {})
    graph.take_over(function)
    assert (graph.lowered, graph.unused, graph.refused) == (True, [], function.refused)
    assert graph.not_lowered == {"a reason": "first place", "another": "third place"}
    graph.take_over(graph.sibling())
    assert graph.lowered


def test_what_a_loop_carries_is_named_in_the_reason() -> None:
    one = decider()
    assert one.flow("add", one.decide("add"), [CARRIED, WEAK]).reason == "after a loop"
