"""The checks of lint: what each finds, what it leaves alone, and the report."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import polyamp
from polyamp import LossScale, policy
from polyamp.diagnosis.lint import (
    ALIGNMENT,
    CHECKS,
    STUCK_MASS,
    ClassLoss,
    Facts,
    Finding,
    Findings,
    Product,
    UserCast,
    judge,
    stuck_mass,
)
from polyamp.errors import InvalidTypeError, InvalidValueError

FP16 = policy("mixed_float16")
BF16 = policy("mixed_bfloat16")
UNCHECKED = policy("mixed_float16", loss_scale=LossScale.none())


def facts(chosen: Any = FP16, **known: Any) -> Facts:
    return Facts("torch", chosen, **known)


def product(*sizes: int, fmt: str = "float16", where: str = "head") -> Product:
    return Product(where, "matmul", fmt, sizes)


FOUND = {
    "optimizer-not-wrapped": [facts(optimizer="plain")],
    "unscaled-loss": [facts(optimizer="wrapped", unscaled=("train.py:12",))],
    "clipped-scaled": [facts(optimizer="wrapped", clipped=("train.py:14",))],
    "unscaled-twice": [facts(optimizer="wrapped", divided=("train.py:15",))],
    "other-scale": [facts(optimizer="wrapped", mixed=("train.py:16",))],
    "layers-not-scaled": [facts(optimizer="plain", layer_policies=(("dense_1", "mixed_float16"),))],
    "stuck-loss": [
        facts(UNCHECKED, losses=(ClassLoss("head", 2000, 32768),)),
        facts(optimizer="wrapped", losses=(ClassLoss("head", 50257, 2**33),)),
    ],
    "no-masters": [
        facts(low_parameters=("weight",)),
        facts(BF16, optimizer="plain", low_parameters=("weight",)),
    ],
    "small-steps": [facts(small_steps=("ode.py:3",))],
    "beyond-format": [facts(beyond=("std",))],
    "foreign-cast": [facts(BF16, casts=(UserCast("block", "Tensor.half", "float16"),))],
    "manual-cast": [
        facts(casts=(UserCast("block", "Tensor.half", "float16"),)),
        facts(casts=(UserCast("block", "Tensor.float", "float32"),)),
    ],
    "unaligned": [facts(products=(product(32, 50257, 512),))],
}

CLEAN = {
    "no facts": facts(),
    "wrapped": facts(optimizer="wrapped"),
    "native scaler": facts(optimizer="native scaler"),
    "bfloat16 needs no wrapping": facts(BF16, optimizer="plain"),
    "float32": facts(policy("float32"), optimizer="plain"),
    "no scaling by the policy's own word": facts(UNCHECKED, optimizer="plain"),
    "masters": facts(optimizer="wrapped", low_parameters=("weight",), has_masters=True),
    "layers with scaling": facts(optimizer="wrapped", layer_policies=(("dense", "mixed_float16"),)),
    "few classes": facts(UNCHECKED, losses=(ClassLoss("head", 10, 32768),)),
    "many classes, scaled": facts(optimizer="wrapped", losses=(ClassLoss("head", 50257, 32768),)),
    "many classes, scaled natively": facts(UNCHECKED, optimizer="native scaler", losses=(ClassLoss("", 50257, 2**15),)),
    "many classes in bfloat16": facts(BF16, losses=(ClassLoss("head", 50257, 2**30),)),
    "aligned": facts(products=(product(32, 50264, 512),)),
    "small": facts(products=(product(8, 3, 1),)),
    "unaligned in float32": facts(products=(product(50257, fmt="float32"), product(50257, fmt="as written"))),
}


def cases() -> list[Any]:
    return [pytest.param(code, known, id=code) for code, examples in FOUND.items() for known in examples]


def test_every_check_has_a_case_and_the_worst_come_first() -> None:
    assert FOUND.keys() == CHECKS.keys()
    severities = [check.severity for check in CHECKS.values()]
    assert severities == sorted(severities, key=["error", "warning", "note"].index)


@pytest.mark.parametrize(("code", "known"), cases())
def test_it_finds_this_and_nothing_else(code: str, known: Facts) -> None:
    findings = list(judge(known))
    assert [finding.code for finding in findings] == [code]
    assert findings[0].severity == CHECKS[code].severity
    assert "{" not in findings[0].what + findings[0].fix


@pytest.mark.parametrize("known", CLEAN.values(), ids=CLEAN)
def test_it_leaves_alone_what_is_right(known: Facts) -> None:
    assert not judge(known), str(judge(known))


@pytest.mark.parametrize(("size", "padded"), [(50257, 50264), (9, 16), (1001, 1008)])
def test_it_says_what_to_pad_to(size: int, padded: int) -> None:
    (finding,) = judge(facts(products=(product(size, 128),)))
    assert f"sizes of {size}:" in finding.what
    assert f"{size} -> {padded}" in finding.fix
    assert "128" not in finding.fix


@given(st.integers(1, 10**6))
def test_a_size_is_reported_exactly_where_it_misses_the_alignment(size: int) -> None:
    assert bool(judge(facts(products=(product(size),)))) == (size > ALIGNMENT and size % ALIGNMENT != 0)


def test_equal_products_are_one_finding() -> None:
    (finding,) = judge(facts(products=tuple(product(100, where=f"block.{layer}") for layer in range(5))))
    assert finding.where == "block.0, block.1, block.2 and 2 more"


@given(st.integers(2, 10**5), st.integers(1, 10**6), st.integers(-4, 24))
def test_the_scale_that_a_stuck_loss_is_told_is_the_smallest_that_helps(classes: int, rows: int, power: int) -> None:
    scaled = policy("mixed_float16", loss_scale=LossScale.fixed(2.0**power))
    report = judge(facts(scaled, losses=(ClassLoss("head", classes, rows),)))
    assert bool(report) == (stuck_mass(classes, rows, 2.0**power) > STUCK_MASS)
    if report:
        needed = int(report.findings[0].fix.partition("2.0**")[2].partition(")")[0])
        assert stuck_mass(classes, rows, 2.0**needed) <= STUCK_MASS < stuck_mass(classes, rows, 2.0 ** (needed - 1))


def test_the_worst_comes_first() -> None:
    report = judge(facts(optimizer="plain", products=(product(100),), low_parameters=("w",)))
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
