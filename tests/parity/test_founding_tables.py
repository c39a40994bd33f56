"""The founding tables: rows that are kept and resumed, their texts, and a page that is what was measured."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "examples")]

import founding_tables as tables  # noqa: E402

from models import founding  # noqa: E402

KEPT = ROOT / "benchmarks" / "results"


def test_published_numbers_are_those_of_the_tables() -> None:
    said = {row.name: row.accuracy for row in founding.ROWS if row.accuracy}
    assert len(said) == 7
    assert all(abs(row.mixed - row.float32) <= 0.3 for row in said.values())
    assert all(row.metric in founding.MARGINS for row in founding.ROWS)
    assert {row.name for row in founding.accuracy_rows()} == {*said, "big_lstm"}


def test_kept_rows_are_of_models_with_margins_that_were_fixed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keeping.RESULTS", KEPT)
    for row in tables.rows(tables.ACCURACY):
        model = founding.row_of(row["name"])
        assert row["metric"] == model.metric
        assert {one["margin"] for one in row["comparisons"]} == {founding.margin_of(model.metric)}
        assert row["seeds"] >= 10


def test_the_page_is_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keeping.RESULTS", KEPT)
    page = tables.PAGE.read_text()
    assert all(f"<!-- {name} -->" in page for name in tables.PARTS)
    assert tables.filled(page) == page
