"""The founding tables: rows that are kept and resumed, their texts, and a page that is what was measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "tests" / "support" / "founding"
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "examples")]

import founding_tables as tables  # noqa: E402

import models.on_torch  # noqa: E402
from models import founding  # noqa: E402

KEPT = ROOT / "benchmarks" / "results"
SEEDS = range(3)


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[founding.Row]:
    """Add a model to the tables that trains in a moment, and keep results in a folder of the test."""
    row = founding.Row("digits", "Digits", "accuracy", founding.Accuracy("digits", 96.0, 96.5, "a test"))
    monkeypatch.setattr(models.on_torch, "__path__", [*models.on_torch.__path__, str(DIGITS)])
    monkeypatch.setattr(founding, "ROWS", (*founding.ROWS, row))
    monkeypatch.setattr("keeping.RESULTS", tmp_path)
    yield row
    sys.modules.pop("models.on_torch.digits", None)


def test_a_row_has_every_value_the_comparisons_and_where_it_ran(tmp_path: Path, digits: founding.Row) -> None:
    tables.keep(tables.ACCURACY, tables.measure("torch", digits, SEEDS))
    (row,) = json.loads((tmp_path / "founding_accuracy.json").read_text())["rows"]
    assert [way["policy"] for way in row["comparisons"]] == list(tables.COLOURS)
    for values in (row["float32"], *(way["values"] for way in row["comparisons"])):
        assert len(values) == row["seeds"] == 3
        assert min(values) > 0.9
    assert {way["margin"] for way in row["comparisons"]} == {0.005}
    assert 0 < row["minutes"] < 10
    assert row["versions"].keys() >= {"polyamp", "torch"}
    assert row["machine"]["cores"] > 0
    assert tables.accuracy_cells(row)[:3] == ["Digits", "96.00, 96.50", "accuracy, %"]


def test_what_was_measured_is_not_measured_again(digits: founding.Row, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"framework": "torch", "name": "digits", "first_seed": 0, "seeds": 3, "versions": tables.versions("torch")}
    kept = tables.keep(tables.ACCURACY, row)
    done = CliRunner().invoke(tables.app, ["accuracy", "--framework", "torch", "--model", "digits", "--seeds", "3"])
    assert done.exit_code == 0
    assert "--again trains it" in done.output
    assert tables.rows(tables.ACCURACY) == [kept]  # also the time at which it finished
    assert tables.earlier("torch", digits, range(2)) == kept
    assert tables.earlier("torch", digits, range(4)) is None
    assert tables.earlier("torch", digits, range(1, 3)) is None
    monkeypatch.setattr(tables, "machine", lambda: {"processor": "another"})
    assert tables.earlier("torch", digits, SEEDS) is None


def test_a_row_that_was_interrupted_goes_on(digits: founding.Row) -> None:
    module = tables.import_module(tables.module_of("torch", "digits"))
    whole, trained, most = module.train, [], [4]

    def interrupted(policy: Any, seed: int) -> dict[str, float]:
        if len(trained) in most:
            raise KeyboardInterrupt
        trained.append((str(policy), seed))
        return whole(policy, seed)

    module.train = interrupted
    with pytest.raises(KeyboardInterrupt):
        tables.measure("torch", digits, SEEDS)
    most.clear()
    tables.measure("torch", digits, SEEDS)
    assert len(trained) == len(set(trained)) == 9


def test_a_model_that_fails_fails_the_command_and_keeps_its_runs(tmp_path: Path, digits: founding.Row) -> None:
    # the process of its own has no such model
    done = CliRunner().invoke(tables.app, ["accuracy", "--framework", "torch", "--model", "digits", "--seeds", "3"])
    assert done.exit_code == 1
    assert f"failed: {digits.title} in torch" in done.output
    assert not (tmp_path / "founding_accuracy.json").exists()


def test_rows_replace_those_of_their_own_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keeping.RESULTS", tmp_path)
    for first, value in ((0, 1), (10, 2), (0, 3)):
        tables.keep("any", {"framework": "jax", "name": "a", "first_seed": first, "value": value})
    assert [(row["first_seed"], row["value"]) for row in tables.rows("any")] == [(0, 3), (10, 2)]


def test_published_numbers_are_those_of_the_tables() -> None:
    said = {row.name: row.accuracy for row in founding.ROWS if row.accuracy}
    assert len(said) == 7
    assert all(abs(row.mixed - row.float32) <= 0.3 for row in said.values())
    assert all(row.metric in founding.MARGINS for row in founding.ROWS)
    assert {row.name for row in founding.accuracy_rows()} == {*said, "big_lstm"}


def way(difference: float | None, verdict: str, more: int | None = None, reason: str | None = None) -> dict[str, Any]:
    return {
        "difference": difference,
        "interval": difference and [difference - 0.01, difference + 0.01],
        "verdict": verdict,
        "more_seeds": more,
        "reason": reason,
        "values": [0.9 if difference is not None else None, 0.91],
    }


def test_cells_have_points_for_fractions_and_nats_for_losses() -> None:
    ways = [way(-0.005, "not yet known", more=27), way(None, "worse", reason="diverged: seed 0")]
    row = {"name": "alexnet", "metric": "accuracy", "float32": [0.9, 0.92], "comparisons": ways, "minutes": 2.0}
    cells = tables.accuracy_cells(row)
    assert len(cells) == len(tables.HEADINGS)
    assert cells[:4] == ["AlexNet", "56.77, 56.93", "accuracy, %", "91.00 ± 1.41"]
    assert cells[4:6] == ["90.50 ± 0.71", "1 of 2 diverged"]
    assert cells[6:8] == ["-0.50 [-1.50, +0.50]", "not yet known: about 27 seeds would tell"]
    assert cells[8:] == ["–", "worse: diverged: seed 0", "2.0"]
    assert tables.accuracy_cells(row | {"name": "big_lstm", "metric": "loss"})[3] == "0.9100 ± 0.0141"


def test_the_speed_table_has_both_baselines_and_native_beside_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keeping.RESULTS", tmp_path)
    ratios = {"float32": 1.0, "native float16": 3.0, "polyamp float16": 3.1, "polyamp bfloat16": None}
    found = [
        {"model": "gnmt", "way": "eager", "variant": variant, "times_float32": ratio, "times_tf32": ratio and ratio / 2}
        for variant, ratio in ratios.items()
    ]
    (tmp_path / "end_to_end_cuda.json").write_text(json.dumps({"rows": found}))
    (table,) = tables.speed_part()
    assert "| GNMT | 2 | gnmt, eager | float16, x float32: 3.10 / 3.00; float16, x TF32: 1.55 / 1.50 |" in table
    assert "| Jasper | 2.2 to 3 | jasper | not measured yet: needs a GPU |" in table


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
