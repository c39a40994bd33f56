"""The automatic policy is the fastest 16-bit one that is right on every loaded framework's device."""

import logging
from typing import Any

import pytest

import polyamp
from polyamp import auto
from polyamp.adapters import AdapterTable


def adapter(name: str, *fast: str) -> AdapterTable:
    described = {"version": "1", "devices": [{"name": "cuda:0 GPU", "fast": list(fast)}], "notes": []}
    return AdapterTable(name, {}, owns=complex, verbs={"describe": lambda: described})


def kept(*wrong: str, **speeds: float) -> dict[str, Any]:
    """A kept self-test, with the speed of each format, and what is wrong in float16."""
    findings = [
        {
            "operation": operation,
            "format": format_name,
            "verdict": "wrong" if format_name == "float16" and operation in wrong else "right",
            "speed": speed,
        }
        for operation in ("matmul", "conv", "sum")
        for format_name, speed in {"float32": 1.0, **speeds}.items()
    ]
    return {"devices": {"cuda:0 GPU": findings}, "notes": []}


@pytest.mark.parametrize(
    ("tests", "name"),
    [
        ([kept(float16=2.1, bfloat16=2.0)], "mixed_bfloat16"),  # which needs no loss scale
        ([kept(float16=3.0, bfloat16=2.0)], "mixed_float16"),
        ([kept("conv", float16=3.0, bfloat16=2.0)], "mixed_bfloat16"),
        ([kept("sum", float16=3.0, bfloat16=0.5)], "float32"),
        ([kept(float16=0.3, bfloat16=1.0)], "float32"),
        ([kept(float16=3.0, bfloat16=0.5), kept(float16=2.0, bfloat16=3.0)], "mixed_float16"),
        ([kept(float16=3.0, bfloat16=0.5), kept("matmul", float16=2.0, bfloat16=3.0)], "float32"),
    ],
)
def test_the_fastest_right_format_is_chosen(
    tests: list[dict[str, Any]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = {f"mine{index}": test for index, test in enumerate(tests)}
    monkeypatch.setattr(auto, "kept_result", lambda name, described: results[name])
    found, why = auto.choose([adapter(one, "float16", "bfloat16") for one in results])
    assert found == name
    assert why.count("by its self-test") == len(tests)


@pytest.mark.parametrize(
    ("fast", "name"),
    [((), "float32"), (("float16",), "mixed_float16"), (("float16", "bfloat16", "tensorfloat32"), "mixed_bfloat16")],
)
def test_without_a_test_the_devices_units_decide(
    fast: tuple[str, ...], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "kept_result", lambda name, described: None)
    found, why = auto.choose([adapter("mine", *fast)])
    assert (found, "polyamp doctor --test measures it" in why) == (name, True)


def test_the_policy_has_the_chosen_name_and_the_log_has_the_reason_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(auto, "_chosen", {})
    monkeypatch.setattr(auto.adapters, "loaded", list)
    with caplog.at_level(logging.INFO):
        found, again = polyamp.policy("auto"), polyamp.policy(" Auto", rules={"softmax": "lower"})
    assert (str(found), found) == ("float32", polyamp.policy("float32"))
    assert again == polyamp.policy("float32", rules={"softmax": "lower"})
    (record,) = caplog.records
    assert (record.levelno, "import yours first" in record.getMessage()) == (logging.WARNING, True)


def test_ranks_of_the_same_speed_differ_by_the_rounding_of_what_they_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "kept_result", lambda name, described: kept(float16=3.3, bfloat16=3.1))
    one = adapter("mine", "float16", "bfloat16")
    for factor, is_told in ((1 - 2.0**-24, False), (0.5, True)):
        one.least_over_ranks = lambda numbers, factor=factor: [number * factor for number in numbers]
        _, why = auto.choose([one])
        assert ("on another rank: bfloat16, float16" in why) == is_told
