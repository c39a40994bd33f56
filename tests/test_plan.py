"""Plans: totals, tables, JSON and comparisons."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyamp import Plan
from polyamp.plan import PlannedOperation, aligned, in_bytes

MATMUL = PlannedOperation("matmul", "dot_general", "a/q", "lower", "float16", "table", 1, 2, 8, 100, 180)
EXP = PlannedOperation("exp", "exp", "a/softmax", "full", "float32", "table", 3, 1, 4, 50, 40)
KEPT = PlannedOperation("my_kernel", "my_kernel", "b", "keep", "as written", "unknown operation: runs as written")
PLAN = Plan("mixed_float16", (MATMUL, EXP, MATMUL._replace(where="a/k"), KEPT), 60, 100, ("nothing",))


def test_totals_count_the_turns_of_loops() -> None:
    assert PLAN.totals == {
        "by_format": {"float16": 2, "float32": 1, "as written": 1},
        "casts": 2 + 2 + 3,
        "bytes_cast": 8 + 8 + 3 * 4,
        "bytes_moved": 100 + 100 + 3 * 50,
        "bytes_moved_float32": 180 + 180 + 3 * 40,
        "bytes_saved": 60,
        "bytes_saved_float32": 100,
    }


def test_as_dict_is_json_of_the_promised_keys() -> None:
    saved = json.loads(json.dumps(PLAN.as_dict()))
    assert saved == PLAN.as_dict()
    assert set(saved) == {"policy", "operations", "totals", "unused_rules"}
    assert saved["operations"][0] == {
        "name": "matmul",
        "native": "dot_general",
        "where": "a/q",
        "class": "lower",
        "format": "float16",
        "reason": "table",
    }
    assert saved["totals"].keys() >= {"by_format", "casts", "bytes_cast", "bytes_moved", "bytes_saved"}


def test_it_prints_as_a_table_with_like_operations_in_one_row() -> None:
    assert str(PLAN).splitlines() == [
        "mixed_float16: 4 operations (2 float16, 1 float32, 1 as written), 7 casts of 28 B",
        "moved: 350 B (float32: 480 B, 73% of it)",
        "saved for the backward pass: 60 B (float32: 100 B, 60% of it)",
        "rules that matched nothing: nothing",
        "",
        "operation  class  format      count  moved  why                                 where",
        "matmul     lower  float16         2  200 B  table                               a/q and 1 more",
        "exp        full   float32         1  150 B  table                               a/softmax",
        "my_kernel  keep   as written      1    0 B  unknown operation: runs as written  b",
    ]


def test_every_operation_has_its_own_row_where_that_is_asked_for() -> None:
    rows = PLAN.table(grouped=False).splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["matmul", "exp", "matmul", "my_kernel"]


def test_a_long_table_says_how_much_of_it_is_left_out() -> None:
    many = Plan("p", tuple(EXP._replace(reason=f"after {index}") for index in range(30)))
    assert str(many).splitlines()[-1] == "10 more rows: print(plan.table())"
    assert len(many.table().splitlines()) == 31


def test_an_empty_plan_prints_and_saves() -> None:
    plan = Plan("float32", ())
    assert str(plan).splitlines()[0] == "float32: 0 operations (none), 0 casts of 0 B"
    assert plan.totals["bytes_moved"] == 0


operations = st.builds(
    PlannedOperation,
    *(st.sampled_from(["exp", "matmul"]) for _ in range(3)),
    st.just("full"),
    st.sampled_from(["float16", "float32"]),
    st.just("table"),
    *(st.integers(0, 100) for _ in range(5)),
)


@given(st.lists(operations), st.lists(operations))
def test_totals_of_two_plans_add_up(first: list[Any], second: list[Any]) -> None:
    one, two, both = (Plan("p", tuple(ops)).totals for ops in (first, second, first + second))
    for key in ("casts", "bytes_cast", "bytes_moved", "bytes_moved_float32"):
        assert both[key] == one[key] + two[key]
    assert sum(both["by_format"].values()) == len(first + second)


def test_a_comparison_shows_totals_and_what_changed() -> None:
    other = Plan("bf16", (MATMUL._replace(format="bfloat16"), EXP), 80, 100)
    comparison = PLAN.compare(other)
    assert comparison.changed == [
        ("matmul", "a/q", {"float16": 1}, {"bfloat16": 1}),
        ("matmul", "a/k", {"float16": 1}, {}),
        ("my_kernel", "b", {"as written": 1}, {}),
    ]
    saved = json.loads(json.dumps(comparison.as_dict()))
    assert saved["policies"] == ["mixed_float16", "bf16"]
    assert saved["totals"][1]["bytes_saved"] == 80
    assert saved["changed"][0] == {"name": "matmul", "where": "a/q", "formats": [{"float16": 1}, {"bfloat16": 1}]}
    text = str(comparison)
    assert "bytes_saved   60 B   80 B" in text
    assert "matmul     a/k    1 float16     none" in text


def test_a_plan_compared_with_itself_differs_nowhere() -> None:
    assert PLAN.compare(PLAN).changed == []
    assert str(PLAN.compare(PLAN)).endswith("no operation differs")


def test_saved_bytes_that_are_not_known_are_said_to_be_so() -> None:
    unknown = Plan("p", (EXP,))
    assert "saved" not in str(unknown)
    assert "unknown" in str(PLAN.compare(unknown))


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (2**31, "2.0 GiB"), (2**50, "1024.0 TiB")]
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert in_bytes(count) == text


def test_columns_are_aligned() -> None:
    assert aligned([("a", "bb"), ("ccc", "d")], right=[1]) == "a    bb\nccc   d"
