"""The checks of lint: what each finds, what it leaves alone, and the report."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import polyamp
from polyamp import LossScale, policy
from polyamp.diagnosis.lint import ALIGNMENT, CHECKS, STUCK_MASS, Case, Finding, Findings, Holder, judge, stuck_mass
from polyamp.errors import InvalidTypeError, InvalidValueError
from polyamp.flow import AS_WRITTEN
from polyamp.plan import BY_HAND, PlannedOperation

FP16 = policy("mixed_float16")
BF16 = policy("mixed_bfloat16")
UNCHECKED = policy("mixed_float16", loss_scale=LossScale.none())


def case(*operations: PlannedOperation, chosen: Any = FP16, rows: int | None = None, **known: Any) -> Case:
    return Case(chosen, Holder("torch", **known), operations, rows)


def product(*sizes: int, fmt: str = "float16", where: str = "head", why: str = "table") -> PlannedOperation:
    return PlannedOperation("matmul", "mm", where, "lower", fmt, why, sizes=sizes)


def loss(classes: int, rows: int) -> PlannedOperation:
    return PlannedOperation("cross_entropy", "nll", "head", "full", "float32", "table", sizes=(classes, rows))


def cast(target: str) -> PlannedOperation:
    return PlannedOperation("cast", "half", "block", "keep", AS_WRITTEN, f"{BY_HAND}{target}")


FOUND = {
    "optimizer-not-wrapped": [case(kind="plain")],
    "unscaled-loss": [case(kind="wrapped", unscaled=("train.py:12",))],
    "stuck-loss": [
        case(loss(2000, 32768), chosen=UNCHECKED),
        case(loss(2000, 1), chosen=UNCHECKED, rows=32768),
        case(loss(50257, 2**33), kind="wrapped"),
    ],
    "no-masters": [case(low=("weight",)), case(kind="plain", low=("weight",), chosen=BF16)],
    "beyond-format": [case(beyond=("std",))],
    "foreign-cast": [case(cast("float16"), chosen=BF16)],
    "manual-cast": [case(cast("float16"))],
    "unaligned": [
        case(product(32, 50257, 512)),
        case(product(32, 50257, fmt=AS_WRITTEN, why="an input is bfloat16")),
    ],
}

CLEAN = {
    "nothing": case(),
    "wrapped": case(kind="wrapped"),
    "native scaler": case(kind="native scaler"),
    "bfloat16 needs no wrapping": case(kind="plain", chosen=BF16),
    "float32": case(kind="plain", chosen=policy("float32")),
    "no scaling by the policy's own word": case(kind="plain", chosen=UNCHECKED),
    "masters": case(kind="wrapped", low=("weight",), has_masters=True),
    "few classes": case(loss(10, 32768), chosen=UNCHECKED),
    "a sum": case(loss(2000, 32768), chosen=UNCHECKED, rows=1),
    "many classes, scaled": case(loss(50257, 32768), kind="wrapped"),
    "many classes, scaled natively": case(loss(50257, 2**15), chosen=UNCHECKED, kind="native scaler"),
    "many classes in bfloat16": case(loss(50257, 2**30), chosen=BF16),
    "aligned": case(product(32, 50264, 512)),
    "small": case(product(8, 3, 1)),
    "unaligned in float32": case(product(50257, fmt="float32"), product(50257, fmt=AS_WRITTEN, why="keep")),
}


def cases() -> list[Any]:
    return [pytest.param(code, known, id=code) for code, examples in FOUND.items() for known in examples]


def test_every_check_has_a_case_and_the_worst_come_first() -> None:
    assert FOUND.keys() == CHECKS.keys()
    severities = [check.severity for check in CHECKS.values()]
    assert severities == sorted(severities, key=["error", "warning", "note"].index)


@pytest.mark.parametrize(("code", "known"), cases())
def test_it_finds_this_and_nothing_else(code: str, known: Case) -> None:
    findings = list(judge(known))
    assert [finding.code for finding in findings] == [code]
    assert findings[0].severity == CHECKS[code].severity
    assert "{" not in findings[0].what + findings[0].fix


@pytest.mark.parametrize("known", CLEAN.values(), ids=CLEAN)
def test_it_leaves_alone_what_is_right(known: Case) -> None:
    assert not judge(known), str(judge(known))


@pytest.mark.parametrize(("size", "padded"), [(50257, 50264), (9, 16), (1001, 1008)])
def test_it_says_what_to_pad_to(size: int, padded: int) -> None:
    (finding,) = judge(case(product(size, 128)))
    assert f"sizes of {size}:" in finding.what
    assert f"{size} -> {padded}" in finding.fix
    assert "128" not in finding.fix


@given(st.integers(1, 10**6))
def test_a_size_is_reported_exactly_where_it_misses_the_alignment(size: int) -> None:
    assert bool(judge(case(product(size)))) == (size > ALIGNMENT and size % ALIGNMENT != 0)


def test_equal_products_are_one_finding() -> None:
    (finding,) = judge(case(*(product(100, where=f"block.{layer}") for layer in range(5))))
    assert finding.where == "block.0, block.1, block.2 and 2 more"


@given(st.integers(2, 10**5), st.integers(1, 10**6), st.integers(-4, 24))
def test_the_scale_that_a_stuck_loss_is_told_is_the_smallest_that_helps(classes: int, rows: int, power: int) -> None:
    scaled = policy("mixed_float16", loss_scale=LossScale.fixed(2.0**power))
    report = judge(case(loss(classes, rows), chosen=scaled))
    assert bool(report) == (stuck_mass(classes, rows, 2.0**power) > STUCK_MASS)
    if report:
        needed = int(report.findings[0].fix.partition("2.0**")[2].partition(")")[0])
        assert stuck_mass(classes, rows, 2.0**needed) <= STUCK_MASS < stuck_mass(classes, rows, 2.0 ** (needed - 1))


def test_the_worst_comes_first() -> None:
    report = judge(case(product(100), kind="plain", low=("w",)))
    assert [finding.severity for finding in report] == ["error", "warning", "note"]
    assert (report.errors, report.warnings, report.notes) == tuple((finding,) for finding in report)


REPORT = Findings(
    "torch",
    "mixed_float16",
    (
        Finding("unscaled-loss", "error", "the loss is not scaled", "", "wrap once"),
        Finding("unaligned", "note", "n = 100", "head", "pad 100 -> 104"),
    ),
)


def test_it_prints_as_plain_text() -> None:
    assert str(REPORT).splitlines() == [
        "torch, mixed_float16: 1 error, 1 note",
        "",
        "error: the loss is not scaled [unscaled-loss]",
        "  to do: wrap once",
        "",
        "note: n = 100 [unaligned]",
        "  where: head",
        "  to do: pad 100 -> 104",
    ]


@pytest.mark.parametrize(("rows", "error"), [(1.0, InvalidTypeError), (True, InvalidTypeError), (0, InvalidValueError)])
def test_a_count_is_an_integer_of_at_least_one(rows: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="rows"):
        polyamp.lint(print, rows=rows)
