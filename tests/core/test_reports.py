"""The warnings that tell what a policy could not do in a program."""

from __future__ import annotations

import warnings

from polyamp.errors import forget_warnings
from polyamp.flow import Rule
from polyamp.plan import report_nothing_lowered, report_refused, report_unused


def shown_by(report: object, *args: object, **kwargs: object) -> list[tuple[str, str]]:
    """The warnings of a report, each with the file that it points at."""
    forget_warnings()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            report(*args, **kwargs)  # type: ignore[operator]
    return [(str(one.message), one.filename) for one in found]


def test_reports_are_shown_once_and_point_at_the_caller() -> None:
    rules = [Rule("haed/*", "full"), Rule("tail", "full")]
    unused = shown_by(report_unused, rules, where="step", paths="a module", of="mixed_float16")
    assert [message.partition(":")[0] for message, _ in unused] == [
        "the rule 'haed/*' of mixed_float16 matched nothing in step",
        "the rule 'tail' of mixed_float16 matched nothing in step",
    ]
    unlowered = shown_by(report_nothing_lowered, "rewrite", "float16", where="step")
    assert [message for message, _ in unlowered] == [
        "rewrite to float16 changed nothing in step: it has no float32 operation of class lower, such as matmul and "
        "conv. polyamp.explain shows the reason for each operation."
    ]
    missing = {"there is no float16 kernel for Tanh on CPU": "rule 'tanh'"}
    refused = shown_by(report_refused, missing, where="step", of="mixed_float16")
    assert [message for message, _ in refused] == [
        "rule 'tanh' of mixed_float16 has no effect in step: there is no float16 kernel for Tanh on CPU."
    ]
    assert {file for _, file in [*unused, *unlowered, *refused]} == {__file__}


def test_a_rule_of_an_unknown_policy_is_reported_too() -> None:
    [(message, _)] = shown_by(report_unused, [Rule("haed", "full")], where="TensorFlow code", paths="a name scope")
    assert message.startswith("the rule 'haed' matched nothing in TensorFlow code: ")
