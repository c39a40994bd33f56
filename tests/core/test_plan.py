"""Plans: totals, tables and JSON."""

import json
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyamp import Plan
from polyamp.batch import Footprint, Pass
from polyamp.errors import InvalidValueError
from polyamp.plan import PlannedOperation

MATMUL = PlannedOperation("matmul", "dot_general", "a/q", "lower", "float16", "table", 1, 2, 8, 100, 180)
EXP = PlannedOperation("exp", "exp", "a/softmax", "full", "float32", "table", 3, 1, 4, 50, 40)
KEPT = PlannedOperation("my_kernel", "my_kernel", "b", "keep", "as written", "unknown operation: runs as written")


def footprint(examples: int, each: int, *moments: tuple[int, int]) -> Footprint:
    """The memory of ten parameters: what each example keeps, and what is in use at each moment, fixed and for each."""
    once, twice = (
        Pass(10, n * each, [fixed + n * grows for fixed, grows in moments]) for n in (examples, 2 * examples)
    )
    return Footprint(examples, once, twice)


PLAN = Plan(
    "mixed_float16",
    (MATMUL, EXP, MATMUL._replace(where="a/k"), KEPT),
    60,
    100,
    ("nothing",),
    footprint=footprint(5, 12, (100, 12), (400, 2)),
    footprint_float32=footprint(5, 20, (100, 20)),
)


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
    assert PLAN.batch == {"examples": 5, "bytes_saved_each": 12, "bytes_saved_each_float32": 20}


@pytest.mark.parametrize("plan", [PLAN, Plan("float32", ())], ids=["full", "empty"])
def test_as_dict_is_json_of_the_promised_keys(plan: Plan) -> None:
    saved = json.loads(json.dumps(plan.as_dict()))
    assert saved == plan.as_dict()
    assert set(saved) - {"batch"} == {"policy", "operations", "totals", "unused_rules"}
    assert saved.get("batch", {}) == plan.batch
    assert saved["totals"].keys() >= {"by_format", "casts", "bytes_cast", "bytes_moved", "bytes_saved"}


def test_as_dict_has_every_operation_in_its_order_and_the_unused_rules() -> None:
    saved = PLAN.as_dict()
    assert saved["unused_rules"] == ["nothing"]
    assert [op["where"] for op in saved["operations"]] == ["a/q", "a/softmax", "a/k", "b"]
    assert saved["operations"][0] == {
        "name": "matmul",
        "native": "dot_general",
        "where": "a/q",
        "class": "lower",
        "format": "float16",
        "reason": "table",
    }


def test_it_prints_as_a_table_with_like_operations_in_one_row() -> None:
    assert str(PLAN).splitlines() == [
        "mixed_float16: 4 operations (2 float16, 1 float32, 1 as written), 7 casts of 28 B",
        "moved: 350 B (float32: 480 B, 73% of it)",
        "saved for the backward pass: 60 B (float32: 100 B, 60% of it); 12 B for each of 5 examples (float32: 20 B)",
        "rules that matched nothing: nothing",
        "",
        "operation  class  format      count  moved  why                                 where",
        "matmul     lower  float16         2  200 B  table                               a/q and 1 more",
        "exp        full   float32         1  150 B  table                               a/softmax",
        "my_kernel  keep   as written      1    0 B  unknown operation: runs as written  b",
    ]


@pytest.mark.parametrize(("rows", "left_out"), [(0, "3 more rows"), (2, "1 more rows"), (3, "")])
def test_as_many_rows_are_given_as_are_asked_for(rows: int, left_out: str) -> None:
    lines = PLAN.table(rows=rows).splitlines()
    assert len(lines) == 1 + rows + bool(left_out)
    assert left_out in lines[-1]


def test_an_empty_plan_prints_and_saves() -> None:
    plan = Plan("float32", ())
    assert str(plan).splitlines() == [
        "float32: 0 operations (none), 0 casts of 0 B",
        "moved: 0 B (float32: 0 B)",
        "",
        "operation  class  format  count  moved  why  where",
    ]
    assert plan.totals["bytes_moved"] == 0


words = st.sampled_from(["exp", "matmul", "a/long/path file.py:3", ""])
operations = st.builds(
    PlannedOperation,
    st.sampled_from(["exp", "matmul"]),
    *(words for _ in range(3)),
    st.sampled_from(["float16", "float32", "as written"]),
    st.sampled_from(["table", "next to matmul"]),
    *(st.integers(0, 10**6) for _ in range(5)),
)
lists_of_operations = st.lists(operations, max_size=8)


@given(lists_of_operations, lists_of_operations)
def test_totals_of_two_plans_add_up(first: list[Any], second: list[Any]) -> None:
    one, two, both = (Plan("p", tuple(ops)).totals for ops in (first, second, first + second))
    for key in ("casts", "bytes_cast", "bytes_moved", "bytes_moved_float32"):
        assert both[key] == one[key] + two[key]
    assert both["by_format"] == Counter(one["by_format"]) + Counter(two["by_format"])
    assert sum(both["by_format"].values()) == len(first + second)


@given(operations, st.integers(1, 5))
def test_a_loop_is_so_many_turns_of_its_body(body: PlannedOperation, times: int) -> None:
    loop, unrolled = (
        Plan("p", ops).totals for ops in ((body._replace(times=times),), (body._replace(times=1),) * times)
    )
    assert {**loop, "by_format": {}} == {**unrolled, "by_format": {}}
    assert loop["by_format"] == {body.format: 1}


@given(lists_of_operations)
def test_the_columns_of_any_table_stand_under_their_heads(ops: list[PlannedOperation]) -> None:
    head, *rows = Plan("p", tuple(ops)).table().splitlines()
    starts = [match.start() for match in re.finditer(r"(?<!\S)(?=\S)", head)]
    for row in rows:
        padded = row.ljust(len(head))
        left = (index for index, start in enumerate(starts) if index not in (3, 4))
        assert all(padded[starts[index] - 2 : starts[index]] in ("", "  ") for index in left)
        assert padded[head.index("count") + 4].isdigit()
        assert padded[head.index("moved") + 4] == "B"


def test_saved_bytes_that_are_not_known_are_not_printed() -> None:
    unknown = Plan("p", (EXP,))
    assert unknown.as_dict()["totals"]["bytes_saved"] is None
    assert "saved" not in str(unknown)


# --- the largest batch ------------------------------------------------------------------------------------------------


def test_the_fullest_moment_decides_and_the_optimizer_comes_on_top() -> None:
    assert PLAN.largest_batch(1300, optimizer_bytes=0) == (60, 100)
    assert PLAN.largest_batch(1380) == (60, 100)  # AdamW keeps 8 bytes for each of 10 parameters
    assert PLAN.largest_batch(440, optimizer_bytes=0) == (17, 20)  # the other moment is the fullest
    assert PLAN.largest_batch(99, optimizer_bytes=0) == (0, 0)


@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 50)), min_size=1), st.integers(1, 9), st.integers(1, 2000)
)
def test_growth_between_two_passes_is_that_of_every_batch(
    moments: list[tuple[int, int]], examples: int, memory: int
) -> None:
    largest = footprint(examples, 0, *moments).largest_batch(memory, 0)
    assert largest == 0 or all(fixed + largest * each <= memory for fixed, each in moments)
    assert any(fixed + (largest + 1) * each > memory for fixed, each in moments) or not any(
        each for fixed, each in moments
    )


@pytest.mark.parametrize(
    ("memory", "options"),
    [(0, {}), (-1, {}), (1.5, {}), ("16GiB", {}), (True, {}), (float("nan"), {}), (2**30, {"optimizer_bytes": -1})],
)
def test_memory_is_a_number_of_bytes(memory: Any, options: Any) -> None:
    with pytest.raises(InvalidValueError, match="bytes"):
        PLAN.largest_batch(memory, **options)
