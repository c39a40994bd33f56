"""Differences between two programs: statistics, masks, logits, the report's text and JSON, and refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp.diagnosis.causes import MOST, Cause, _candidates, find_causes
from polyamp.diagnosis.differences import Differences, log_probs
from polyamp.diagnosis.mismatch import Comparison, Mismatch
from polyamp.diagnosis.programs import Program
from polyamp.errors import InvalidTypeError, InvalidValueError, PolyampWarning, UnsupportedError
from polyamp.plan import Plan, PlannedOperation

TRAIN = np.log(np.array([[0.5, 0.25, 0.1], [0.2, 0.4, 0.3]]))
INFER = np.log(np.array([[0.5, 0.20, 0.1], [0.4, 0.4, 0.3]]))


def returning(values: Any) -> Callable[..., Any]:
    return lambda *args: values


def compared(train: Any = TRAIN, infer: Any = INFER, **options: Any) -> Differences:
    found = polyamp.mismatch(returning(train), returning(infer), **{"policies": None, **options})
    return found["as written"].differences


def test_the_statistics_are_those_of_the_definitions() -> None:
    found = compared()
    each = np.array([0.0, math.log(1.25), 0.0, math.log(0.5), 0.0, 0.0])
    ratio = np.exp(each)
    assert np.allclose(found.each.ravel(), each)
    assert (found.tokens, found.nonfinite) == (6, 0)
    assert found.mean == pytest.approx(np.abs(each).mean())
    assert found.largest == pytest.approx(math.log(2))
    assert found.k1 == pytest.approx(-each.mean())
    assert found.k3 == pytest.approx((ratio - 1 - each).mean())
    assert found.outside == pytest.approx(2 / 6)
    assert found.sequence_ratios == pytest.approx((0.5, 1.25))


def test_the_estimates_agree_with_the_divergence_for_tokens_of_the_inference_program() -> None:
    rng, vocabulary = np.random.default_rng(0), 8
    infer = rng.dirichlet(np.ones(vocabulary))
    train = infer * np.exp(rng.normal(0, 0.1, vocabulary))
    train /= train.sum()
    tokens = rng.choice(vocabulary, size=200_000, p=infer)
    found = Differences(np.log(train)[tokens], np.log(infer)[tokens])
    exact = float((infer * np.log(infer / train)).sum())
    assert found.k1 == pytest.approx(exact, rel=0.2)
    assert found.k3 == pytest.approx(exact, rel=0.05)


def test_the_clip_range_decides_what_is_outside() -> None:
    assert compared(clip=(0.4, 1.1)).outside == pytest.approx(1 / 6)


def test_masked_tokens_do_not_count() -> None:
    found = compared(mask=np.array([[1, 0, 1], [1, 1, 0]]))
    assert (found.tokens, found.largest) == (4, pytest.approx(math.log(2)))
    assert found.sequence_ratios == pytest.approx((0.5, 1.0))


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
def test_numbers_that_are_not_finite_are_reported_and_left_out(bad: float, tmp_path: Path) -> None:
    train = TRAIN.copy()
    train[1, 0] = bad
    report = polyamp.mismatch(returning(train), returning(INFER), policies=None)
    found = report["as written"].differences
    assert (found.nonfinite, found.largest) == (1, pytest.approx(math.log(1.25)))
    assert "1 token has a log-probability that is inf or NaN" in str(report)
    report.save(tmp_path / "report.json")


def test_nothing_finite_leaves_numbers_that_json_can_hold(tmp_path: Path) -> None:
    report = polyamp.mismatch(returning(TRAIN * math.nan), returning(INFER), policies=None)
    report.save(tmp_path / "report.json")
    saved = json.loads((tmp_path / "report.json").read_text())["comparisons"][0]
    assert (saved["nonfinite"], saved["mean"], saved["k3"]) == (6, None, None)
    assert "6 tokens" in str(report)


def test_logits_are_normalised_without_rounding() -> None:
    rng = np.random.default_rng(0)
    logits, tokens = rng.normal(0, 30, (2, 5, 11)), rng.integers(11, size=(2, 5))
    shifted = logits - logits.max(-1, keepdims=True)
    expected = np.take_along_axis(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)), tokens[..., None], -1)
    assert np.allclose(log_probs(logits, tokens, where="train_fn"), expected[..., 0], atol=1e-12)
    assert compared(logits, logits + 5, tokens=tokens).largest < 1e-12


def test_one_program_may_return_logits_and_the_other_log_probabilities() -> None:
    logits, tokens = np.zeros((2, 3, 4)), np.zeros((2, 3), int)
    assert compared(logits, np.full((2, 3), math.log(1 / 4)), tokens=tokens).largest < 1e-12


def test_half_precision_results_are_read() -> None:
    assert compared(TRAIN.astype(np.float16), TRAIN.astype(np.float32)).largest < 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"infer": INFER[:, 1:]}, "the programs return different shapes"),
        ({"train": np.ones((2, 3), int)}, "a program must return floating-point numbers"),
        ({"train": [0.5]}, "a program must return floating-point numbers"),
        ({"train": np.ones((2, 3, 4)), "infer": np.ones((2, 3, 4))}, "log-probabilities must not be positive"),
        ({"tokens": np.zeros((2, 4), int)}, "logits and tokens have shapes that do not fit"),
        ({"train": np.ones((2, 3, 4)), "tokens": np.full((2, 3), 4)}, "tokens must be numbers of the vocabulary"),
        ({"mask": np.ones((2, 2))}, "the mask must have one number for each token"),
        ({"clip": (1.2, 0.8)}, "invalid clip range"),
        ({"policies": []}, "nothing to compare under"),
        ({"policies": [("float32", "float32", "float32")]}, "a pair has two policies"),
        ({"policies": ["mixed_float61"]}, "unknown policy"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_compared_is_refused_in_words(options: dict[str, Any], message: str) -> None:
    with pytest.raises((InvalidValueError, InvalidTypeError)) as caught:
        compared(**options)
    first, *parts = str(caught.value).splitlines()
    assert first.startswith(message)
    assert [part.split(":")[0].strip() for part in parts] == ["where", "found", "allowed", "to do"]


def test_a_program_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(InvalidTypeError, match="cannot be called"):
        polyamp.mismatch(TRAIN, returning(INFER))  # type: ignore[arg-type]


def report(*means: float, causes: tuple[Cause, ...] = ()) -> Mismatch:
    """Return a report about float32, bfloat16 and float16 with these mean differences."""
    names = ("float32", "mixed_bfloat16", "mixed_float16")
    found = []
    for name, mean in zip(names, means, strict=False):
        policy = polyamp.policy(name)
        differences = Differences(np.full((2, 4), -1.0), np.full((2, 4), -1.0 - mean))
        found.append(Comparison((policy, policy), differences, causes if policy.casts else ()))
    return Mismatch(tuple(found))


def test_the_better_format_is_named() -> None:
    assert report(1e-7, 0.08, 0.01).conclusions() == ["mixed_float16 differs 8.0 times less than mixed_bfloat16"]


def test_programs_that_differ_in_float32_are_not_a_matter_of_formats() -> None:
    assert [text.partition(":")[0] for text in report(0.1, 0.12, 0.1).conclusions()] == [
        "the programs differ in float32 too"
    ]


def test_a_cause_is_a_rule_to_paste_only_if_it_removes_half_of_the_difference() -> None:
    large, small = Cause("head/matmul", "both", 0.02, 0.75), Cause("exp", "train", 0.079, 0.01)
    text = str(report(1e-7, 0.08, causes=(large, small)))
    assert 'mixed_bfloat16: rules={"head/matmul": "full"} removes 75.0% of the difference' in text
    assert "mixed_bfloat16  head/matmul  both      75.0%" in text
    assert "no operation causes half" in str(report(1e-7, 0.08, causes=(small,)))


def test_an_unknown_comparison_is_refused_with_the_known_names() -> None:
    with pytest.raises(InvalidValueError, match="allowed: 'float32', 'mixed_bfloat16'"):
        report(1e-7, 0.08)["bfloat16"]


def test_equal_programs_leave_nothing_to_say() -> None:
    assert report(0.0, 0.0, 0.0).conclusions() == []


def test_a_picture_is_drawn_with_and_without_causes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, causes in (("alone.png", ()), ("causes.svg", (Cause("head/matmul", "both", 0.02, 0.75),))):
        report(1e-7, 0.08, 0.01, causes=causes).plot(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000


class Unplanned(Program):
    """A program that cannot be explained."""

    def plan(self) -> Plan:
        raise UnsupportedError("this cannot be captured")


def test_a_program_without_a_plan_leaves_the_causes_open() -> None:
    policy = polyamp.policy("mixed_float16")
    programs = Unplanned("train", abs, (), policy), Unplanned("infer", abs, (), policy)
    with pytest.warns(PolyampWarning, match="tries no operation of the (train|infer) program.*cannot be captured"):
        assert find_causes(programs, 0.1, lambda programs: 0.0) == ()


class Planned(Program):
    """A program of two operations in 16 bits."""

    def plan(self) -> Plan:
        names = ("matmul", "exp") if self.name == "train" else ("matmul",)
        return Plan("", tuple(PlannedOperation(name, name, "head", "lower", "float16", "table") for name in names))


@pytest.mark.parametrize(("left", "found"), [(math.nan, []), (0.02, ["head/exp", "head/matmul"])])
def test_equal_causes_start_with_those_of_one_program_and_trials_without_numbers_are_left_out(
    left: float, found: list[str]
) -> None:
    policy = polyamp.policy("mixed_float16")
    programs = Planned("train", abs, (), policy), Planned("infer", abs, (), policy)
    causes = find_causes(programs, 0.1, lambda programs: left)
    assert [one.rule for one in causes] == found
    assert [one.programs for one in causes] == ["train", "both"][: len(found)]


def test_trials_are_limited_to_the_operations_that_occur_most() -> None:
    found = [[("matmul", f"layer{index}/matmul") for index in range(2 * MOST)], [("matmul", "layer50/matmul")]]
    assert len(_candidates(found)) == MOST
    assert _candidates(found)[0] == "layer50/matmul"
