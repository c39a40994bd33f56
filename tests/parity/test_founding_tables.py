"""The founding tables: rows that are kept and resumed, texts, pictures, no time of a CPU, an up-to-date page."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from typer.testing import CliRunner, Result

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "tests" / "support" / "founding"
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "examples")]

import founding_accuracy as accuracy  # noqa: E402
import founding_lstm as lstm  # noqa: E402
import founding_results as results  # noqa: E402
import founding_speed as speed  # noqa: E402
import founding_tables as tables  # noqa: E402
import founding_text as text  # noqa: E402
import models.on_torch  # noqa: E402
import side_by_side  # noqa: E402
from models import founding  # noqa: E402

KEPT = ROOT / "benchmarks" / "results"


@pytest.fixture
def _digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Add a model to the tables that trains in a moment, and keep results in a folder of the test."""
    row = founding.Row("digits", "Digits", "accuracy", founding.Accuracy("digits", 96.0, 96.5, "a test"))
    monkeypatch.setattr(models.on_torch, "__path__", [*models.on_torch.__path__, str(DIGITS)])
    monkeypatch.setattr(founding, "ROWS", (*founding.ROWS, row))
    monkeypatch.setattr(lstm, "MODEL", "digits")
    monkeypatch.setattr("keeping.RESULTS", tmp_path)
    yield
    sys.modules.pop("models.on_torch.digits", None)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(tables.app, [str(one) for one in arguments])


def train(*options: object) -> str:
    done = run("accuracy", "--framework", "torch", "--model", "digits", *options)
    assert done.exit_code == 0, done.output
    return done.output


def kept(tmp_path: Path, name: str = "founding_accuracy_torch") -> list[dict[str, Any]]:
    return json.loads((tmp_path / f"{name}.json").read_text())["rows"]


@pytest.mark.usefixtures("_digits")
def test_a_row_has_every_run_the_comparisons_and_where_it_ran(tmp_path: Path) -> None:
    printed = train("--seeds", 4, "--json", tmp_path / "more.json", "--plot", tmp_path / "accuracy.png")
    (row,) = kept(tmp_path)
    assert [run["seed"] for run in row["float32"]["runs"]] == [0, 1, 2, 3]
    assert [way["policy"] for way in row["comparisons"]] == list(accuracy.POLICIES)
    for way in row["comparisons"]:
        assert len(way["runs"]) == way["seeds"] == 4
        assert way["margin"] == 0.005
        assert way["coverage"] == pytest.approx(0.9)  # without early looks, which would widen it
        assert all(run["value"] > 0.9 for run in way["runs"])
    assert 0 < text.minutes(row) < 10
    assert not list(tmp_path.glob("*.part"))
    assert row["versions"].keys() >= {"polyamp", "torch"}
    assert row["machine"]["cores"] > 0
    assert json.loads((tmp_path / "more.json").read_text())["rows"] == [row]
    assert "Digits" in printed
    assert imread(tmp_path / "accuracy.png").std() > 0.01
    part = text.accuracy_part()
    assert "Rows: 1. Comparisons: " in part
    assert "| Digits | 96.00, 96.50 | accuracy, % | " in part
    assert "4 seeds. Trained on" in part
    assert "### JAX" not in part


@pytest.mark.usefixtures("_digits")
def test_what_was_measured_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train("--seeds", 3)
    first = kept(tmp_path)
    assert "--again trains it again" in train("--seeds", 3)
    assert kept(tmp_path) == first  # also the time at which it finished
    digits = founding.row_of("digits")
    assert accuracy.earlier("torch", digits, range(2)) == first[0]
    assert accuracy.earlier("torch", digits, range(4)) is None
    assert accuracy.earlier("torch", digits, range(1, 3)) is None
    monkeypatch.setattr(accuracy, "machine", lambda: {"processor": "another"})
    assert accuracy.earlier("torch", digits, range(3)) is None


@pytest.mark.usefixtures("_digits")
def test_new_seeds_are_rows_of_their_own(tmp_path: Path) -> None:
    train("--seeds", 3)
    first = kept(tmp_path)
    train("--seeds", 4, "--first-seed", 10, "--plot", tmp_path / "new.png")
    assert kept(tmp_path) == first
    accuracy.draw(tmp_path / "first.png")
    assert (imread(tmp_path / "new.png") != imread(tmp_path / "first.png")).any()
    (row,) = kept(tmp_path, "founding_new_seeds_torch")
    assert [run["seed"] for run in row["float32"]["runs"]] == [10, 11, 12, 13]
    assert "--again trains it again" in train("--seeds", 4, "--first-seed", 10)
    part = text.accuracy_part()
    assert "Rows: 1." in part
    assert "3 seeds. Trained on" in part
    assert "| PyTorch | Digits | 10 to 13 | accuracy, % | " in part


@pytest.mark.usefixtures("_digits")
def test_a_row_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    digits = accuracy.import_module(accuracy.module_of("torch", "digits"))
    digits_row, drawn, whole, trained, most = founding.row_of("digits"), range(3), digits.train, [], [4]

    def interrupted(policy: Any, seed: int) -> dict[str, float]:
        if len(trained) in most:
            raise KeyboardInterrupt
        trained.append((str(policy), seed))
        return whole(policy, seed)

    digits.train = interrupted
    with pytest.raises(KeyboardInterrupt):
        accuracy.measure("torch", digits_row, drawn, progress=False)
    assert accuracy.runs_done("torch", digits_row, drawn) == 4
    trained.clear()
    most.clear()
    row = accuracy.measure("torch", digits_row, drawn, progress=False)
    assert len(trained) == 5  # of nine
    assert accuracy.runs_done("torch", digits_row, drawn) == 9
    accuracy.keep("torch", digits_row, drawn, row)
    assert len(kept(tmp_path)[0]["float32"]["runs"]) == 3
    assert accuracy.runs_done("torch", digits_row, drawn) == 0


def test_a_new_row_replaces_the_one_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keeping.RESULTS", tmp_path)
    for name, value in (("b", 1), ("a", 2), ("b", 3)):
        results.add("founding_accuracy_torch", {"name": name, "value": value})
    assert [(row["name"], row["value"]) for row in kept(tmp_path)] == [("a", 2), ("b", 3)]


@pytest.mark.usefixtures("_digits")
def test_a_model_that_fails_loses_no_other_and_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = founding.Row("digits", "Digits", "recall")  # train does not return it
    monkeypatch.setattr(founding, "ROWS", (broken, founding.ROWS[-1]._replace(name="training", title="No model")))
    monkeypatch.setitem(founding.MARGINS, "recall", 0.01)
    done = run("accuracy", "--framework", "torch", "--seeds", 3, "--jobs", 1)
    assert done.exit_code == 1
    assert "failed: Digits in PyTorch, No model in PyTorch" in done.output
    assert "train returned no such metric" in done.output + capfd.readouterr().err


@pytest.mark.usefixtures("_digits")
def test_rows_side_by_side_are_kept_as_they_end_and_one_that_fails_loses_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = (founding.row_of("digits"), founding.Row("training", "No model", "accuracy"))
    monkeypatch.setattr(founding, "ROWS", rows)
    monkeypatch.setattr(side_by_side, "_alone", lambda work, _threads: work())  # a process has no model of a test
    done = run("accuracy", "--framework", "torch", "--seeds", 3, "--jobs", 2)
    assert done.exit_code == 1
    assert "failed: No model in PyTorch" in done.output
    assert "has no attribute 'train'" in done.output + capfd.readouterr().err
    assert [row["name"] for row in kept(tmp_path)] == ["digits"]
    assert not list(tmp_path.glob("*.part"))


def test_each_piece_of_work_has_a_process_and_its_share_of_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "cores", lambda: 6)
    for name in side_by_side.THREADS:
        monkeypatch.delenv(name, raising=False)
    works = {
        "dies": partial(os._exit, 3),
        "fails": partial(divmod, 1, 0),
        "process": os.getpid,
        "another": os.getpid,
        "threads": partial(os.getenv, "OMP_NUM_THREADS"),
    }
    times: list[int] = []
    ended = dict(side_by_side.finished(works, 3, lambda: times.append(1)))
    assert isinstance(ended["dies"].exception(), BrokenProcessPool)
    assert isinstance(ended["fails"].exception(), ZeroDivisionError)
    assert len({os.getpid(), ended["process"].result(), ended["another"].result()}) == 3
    assert ended["threads"].result() == "2"
    assert times
    assert "OMP_NUM_THREADS" not in os.environ


def test_a_model_that_a_framework_does_not_have_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keeping.RESULTS", tmp_path)
    monkeypatch.setattr(founding, "ROWS", (founding.Row("absent", "Absent", "accuracy"),))
    done = run("accuracy", "--framework", "jax")
    assert done.exit_code == 0
    assert "Absent in JAX: not in this framework" in done.output
    assert list(tmp_path.iterdir()) == []


def test_rows_of_several_people_are_gathered_and_the_newest_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name for name in ("own", "other")]
    for folder, day, names in zip(folders, (2, 1), (["a", "b"], ["b", "c"]), strict=True):
        folder.mkdir()
        rows = [{"name": name, "finished": f"2026-01-0{day}", "of": folder.name} for name in names]
        (folder / "founding_lstm_jax.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr("keeping.RESULTS", folders[0])
    assert results.gather([folders[1]]) == {"founding_lstm_jax": ["c"]}
    assert [(row["name"], row["of"]) for row in results.rows("founding_lstm_jax")] == [
        ("a", "own"),
        ("b", "own"),
        ("c", "other"),
    ]


@pytest.mark.usefixtures("_digits")
def test_the_figure_has_every_loss_of_every_curve(tmp_path: Path) -> None:
    done = run("figure", "--framework", "torch", "--steps", 12, "--plot", tmp_path / "lstm.png")
    assert done.exit_code == 0, done.output
    curves = kept(tmp_path, "founding_lstm_torch")
    assert {row["name"] for row in curves} == set(lstm.CURVES)
    assert all(len(row["losses"]) == 12 for row in curves)
    assert all(row["losses"][-1] < row["losses"][0] for row in curves)
    assert imread(tmp_path / "lstm.png").std() > 0.01
    assert all(name in text.lstm_part() for name in lstm.CURVES)


def test_no_time_of_a_cpu_goes_into_the_speed_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keeping.RESULTS", tmp_path)
    monkeypatch.setattr(tables, "machine", lambda: {"processor": "any"})
    done = run("speed")
    assert done.exit_code == 2
    assert "this machine has no GPU" in done.output
    assert list(tmp_path.iterdir()) == []


SMALL = [
    {"model": "gnmt", "way": "eager", "variant": variant, "times_float32": ratio, "times_tf32": ratio and ratio / 2}
    for variant, ratio in {
        "float32": 1.0,
        "native float16": 3.0,
        "polyamp float16": 3.1,
        "polyamp bfloat16": None,
    }.items()
]


def test_the_speed_table_has_both_baselines_and_native_beside_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keeping.RESULTS", tmp_path)
    for row in speed.collected(founding.row_of("gnmt"), "gnmt", {"versions": {"torch": "2"}, "rows": SMALL}):
        results.add(results.SPEED, row)
    (row,) = speed.measured()
    cells = text.speed_cells(row)
    assert cells == ["GNMT", "2", "gnmt, eager", "3.10 / 3.00", "– / –", "1.55 / 1.50", "– / –"]
    assert len(cells) == len(text.SPEED_HEADINGS)


def test_published_numbers_are_those_of_the_tables() -> None:
    said = {row.name: row.accuracy for row in founding.ROWS if row.accuracy}
    assert len(said) == 7
    assert all(abs(row.mixed - row.float32) <= 0.3 for row in said.values())
    assert {row.name: speed.published(row) for row in speed.timed_rows()} == {
        **{"bert": "3.25 to 4.25", "jasper": "2.2 to 3", "mask_rcnn": "1.2 to 1.5", "transformer": "4", "gnmt": "2"}
    }
    assert all(row.metric in founding.MARGINS for row in founding.ROWS)
    assert {row.name for row in founding.accuracy_rows()} == {*said, "big_lstm"}


def way(difference: float | None, verdict: str, more: int | None = None, reason: str | None = None) -> dict[str, Any]:
    values = [0.9, 0.91] if difference is not None else [None, 0.91]
    return {
        "policy": "mixed_float16 and more",
        "difference": difference,
        "interval": difference and [difference - 0.01, difference + 0.01],
        "margin": 0.005,
        "verdict": verdict,
        "more_seeds": more,
        "reason": reason,
        "runs": [{"value": value} for value in values],
    }


def test_cells_have_points_for_fractions_and_nats_for_losses() -> None:
    row = {
        "name": "alexnet",
        "metric": "accuracy",
        "float32": {"runs": [{"value": 0.9}, {"value": 0.92}]},
        "comparisons": [way(-0.005, "not yet known", more=27), way(None, "worse", reason="diverged: seed 0")],
    }
    cells = text.accuracy_cells(row)
    assert len(cells) == len(text.ACCURACY_HEADINGS)
    assert cells[:4] == ["AlexNet", "56.77, 56.93", "accuracy, %", "91.00 ± 1.41"]
    assert cells[4:6] == ["90.50 ± 0.71", "1 of 2 diverged"]
    assert cells[6:8] == ["-0.50 [-1.50, +0.50]", "not yet known: about 27 seeds would tell"]
    assert cells[8:] == ["–", "worse: diverged: seed 0"]
    assert text.accuracy_cells(row | {"name": "big_lstm", "metric": "loss"})[3] == "0.9100 ± 0.0141"


@pytest.mark.parametrize("framework", results.FRAMEWORKS)
def test_kept_rows_are_of_models_with_margins_that_were_fixed_before(framework: str) -> None:
    for row in results.rows(results.ACCURACY.format(framework), KEPT):
        model = founding.row_of(row["name"])
        assert row["metric"] == model.metric
        assert {way["margin"] for way in row["comparisons"]} == {founding.margin_of(model.metric)}
        assert row["seeds"] >= 10


def test_the_page_is_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keeping.RESULTS", KEPT)
    page = text.PAGE.read_text()
    assert all(f"<!-- {name} -->" in page for name in text.PARTS)
    assert text.filled(page) == page
