"""The benchmarks of whole steps: the results that they keep, the cases that they leave out, and their comparisons."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from interleave import Budget  # noqa: E402
from keeping import Keeper  # noqa: E402
from whole_steps import Case, base_of, settled, skips_between  # noqa: E402


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Scale:
    """A loop whose loss scale is too large at first."""

    def __init__(self, overflows: int) -> None:
        self.overflows, self.scale, self.calls = overflows, 2.0**16, 0

    def __call__(self) -> None:
        self.scale /= 2 if self.calls < self.overflows else 1
        self.calls += 1

    def loss_scale(self) -> float:
        return self.scale


def case(keeper: Any, budget: Budget) -> Case:
    return Case("model", "eager", keeper, budget, lambda: None, lambda: None)


@pytest.fixture
def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keeper:
    monkeypatch.setattr("keeping.RESULTS", tmp_path)
    return Keeper("kept", {})


def test_variants_that_do_not_fit_are_listed_with_the_reason(keeper: Keeper) -> None:
    clock = Clock()

    def work(variant: str) -> str:
        clock.now += 30.0
        return variant

    done = case(keeper, Budget(100.0, clock)).each(["a", "b", "c", "d"], 10.0, 5.0, work)
    assert list(done) == ["a", "b"]  # then 40 s are left, and the third needs 30 + 3 * 5
    assert [row["variant"] for row in keeper.left_out] == ["c", "d"]
    assert keeper.left_out[0]["reason"] == "about 45 s needed, 40 of 100 s left"


def test_variant_that_fails_loses_no_other_and_fails_the_run(keeper: Keeper, capsys: pytest.CaptureFixture) -> None:
    def work(variant: str) -> float:
        return 1 / (variant != "broken")

    done = case(keeper, Budget()).each(["broken", "whole"], 1.0, 0.0, work)
    assert list(done) == ["whole"]
    assert keeper.left_out[0]["reason"] == "ZeroDivisionError: division by zero"
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert [row["variant"] for row in keeper.failed] == ["broken"]


def test_too_little_memory_is_left_out_and_is_no_failure(keeper: Keeper) -> None:
    class OutOfMemoryError(RuntimeError):
        pass

    def work(variant: str) -> None:
        raise OutOfMemoryError("tried to allocate 80 GiB\nand more")

    case(keeper, Budget()).each(["large"], 1.0, 0.0, work)
    assert keeper.left_out[0]["reason"] == "OutOfMemoryError: tried to allocate 80 GiB"
    assert keeper.failed == []


def test_variants_are_compared_with_their_own_format() -> None:
    known = ["float32", "TF32", "native float16", "polyamp float16"]
    assert base_of("float32", known) == base_of("TF32", known) == "TF32"
    assert base_of("polyamp float16", known) == "native float16"
    assert base_of("polyamp bfloat16", ["polyamp bfloat16"]) == "polyamp bfloat16"


def test_loss_scale_tells_the_skips() -> None:
    assert skips_between(2.0**16, 2.0**13) == 3
    assert skips_between(2.0**16, 2.0**17) == 0  # it grew
    assert skips_between(None, None) == 0


def test_warm_up_lasts_until_the_loss_scale_has_settled() -> None:
    assert settled(Scale(0)) == 4
    assert settled(Scale(5)) == 9
    assert settled(Scale(99)) == 24
