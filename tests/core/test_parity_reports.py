"""Reports of parity: the verdict of all policies together, texts, JSON, and the command with its exit codes."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polyamp.cli import app
from polyamp.diagnosis.comparison import Comparison, Parity
from polyamp.errors import InvalidValueError, UsageError
from support.seeded_runs import compared, quiet, task

EQUIVALENT, WORSE, BETTER, OPEN = [0.1, -0.1, 0.05], [3.0, 3.1, 2.9], [-3.0, -3.1, -2.9], [1.0, -2.0, 3.0]


def way(values: list[float], policy: str = "p", control: str = "") -> Comparison:
    return compared(values, seeds=len(values), policy=policy, control=control)


def told(*ways: Comparison) -> Parity:
    return Parity("train", ways[0].question, ways[0].reference, ways)


@pytest.mark.parametrize(
    ("ways", "verdict"),
    [
        ([way(EQUIVALENT)], "equivalent"),
        ([way(BETTER)], "better"),
        ([way(BETTER), way(EQUIVALENT, "q")], "equivalent"),
        ([way(EQUIVALENT), way(OPEN, "q")], "not yet known"),
        ([way(OPEN), way(WORSE, "q"), way(EQUIVALENT, "r")], "worse"),
        ([way(EQUIVALENT), way(EQUIVALENT, control="a")], "cannot tell"),
        ([way(EQUIVALENT), way(OPEN, control="a")], "cannot tell"),
        ([way(EQUIVALENT), way(EQUIVALENT, control="a"), way(WORSE, control="b")], "equivalent"),
        ([way(EQUIVALENT), way(BETTER, control="a")], "equivalent"),
        ([way(WORSE), way(EQUIVALENT, control="a")], "worse"),
        ([way(EQUIVALENT), way(WORSE, control="a"), way(EQUIVALENT, "q"), way(OPEN, "q", "a")], "cannot tell"),
    ],
)
def test_the_verdict_of_all_is_the_most_serious_one(ways: list[Comparison], verdict: str) -> None:
    found = told(*ways)
    assert found.verdict == found.as_dict()["verdict"] == verdict
    assert bool(found) == (verdict in ("equivalent", "better"))


class TestReport:
    def test_json_has_every_run_and_the_table_a_row_for_each_way(self, tmp_path: Path) -> None:
        found = quiet(task(), ["mixed_float16", "mixed_bfloat16"], seeds=3)
        found.save(tmp_path / "parity.json")
        read = json.loads((tmp_path / "parity.json").read_text())
        assert [one["policy"] for one in read["comparisons"]] == ["mixed_float16", "mixed_bfloat16"]
        assert read["float32"]["runs"][2]["metrics"].keys() == {"loss", "steps"}
        assert len(read["assumptions"]) == 3
        lines = found.table().splitlines()
        assert [line.split()[0] for line in lines] == ["policy", "mixed_float16", "mixed_bfloat16"]
        assert all(line.endswith(("verdict", "equivalent")) for line in lines)

    @pytest.mark.parametrize(
        ("ways", "said"),
        [
            ([way(EQUIVALENT)], "p trains as well as float32, within the margin."),
            ([way([0.3, 0.31, 0.3])], "within the margin: the difference, +0.3, is more than chance."),
            ([way(BETTER)], "p ends better than float32 by more than the margin, so it is not the same training."),
            ([way([1.0, 1.1, 0.9])], "about as large as the margin, so more seeds are not likely to tell."),
            (
                [way(EQUIVALENT), way(WORSE, control="a"), way(EQUIVALENT, control="b")],
                "The task can tell: of its negative controls a (worse), b (equivalent).",
            ),
            ([way(EQUIVALENT), way(OPEN, control="a")], "no negative control of p failed: a (not yet known)."),
        ],
    )
    def test_conclusions(self, ways: list[Comparison], said: str) -> None:
        assert said in str(told(*ways))


class TestCommand:
    @pytest.fixture(autouse=True)
    def _programs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        damage = "lambda policy: (policy.compute == 'float16') * {}"
        made = [f"{name} = task({damage.format(by)})" for name, by in (("good", 0), ("bad", 0.2), ("unclear", 0.0075))]
        made.append("gains = task(lambda policy: (policy.compute == 'float16') * -0.2)")
        made.append("def with_defaults(policy='float32', seed=0): return good(policy, seed)")
        made.append("def talks(policy, seed): print('talk'); return good(policy, seed)")
        made.append("def ends(policy, seed): Path('trained').touch(); sys.exit(0)")
        made.append("def stops(policy, seed): raise KeyboardInterrupt")
        made.append("ignored = lambda: {'train': good, 'seeds': 3, 'margin': 0.5}")
        lines = ["import sys", "from pathlib import Path", "from support.seeded_runs import task"]
        (tmp_path / "programs.py").write_text("\n".join(lines + made))
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "programs", raising=False)

    @pytest.mark.parametrize(
        ("words", "code"),
        [
            (["programs:good", "--no-controls"], 0),
            (["programs:gains", "--no-controls"], 0),
            (["programs:bad"], 3),
            (["programs:gains", "--metric", "loss", "--better", "higher"], 3),
            (["programs:unclear", "--no-controls", "--margin", "0.0075"], 4),
            (["programs:good"], 5),
            (["programs:with_defaults", "--no-controls"], 0),
            (["programs:ends"], 1),
            (["programs:good", "--margin", "wide"], 1),
            (["programs:good", "--seeds", "2"], 2),
        ],
    )
    def test_the_exit_code_is_the_verdict(self, words: list[str], code: int) -> None:
        done = CliRunner().invoke(app, ["parity", *words])
        refused = code == 1 and isinstance(done.exception, (InvalidValueError, UsageError))
        assert done.exit_code == code or refused, done.output

    @pytest.mark.parametrize("words", [["--json", "none/o.json"], ["--json", "."], ["--plot", "o.text"]])
    def test_a_file_that_cannot_be_written_is_refused_before_training(self, tmp_path: Path, words: list[str]) -> None:
        if "--plot" in words:
            pytest.importorskip("matplotlib")
        done = CliRunner().invoke(app, ["parity", "programs:ends", *words])
        assert isinstance(done.exception, InvalidValueError)
        assert not (tmp_path / "trained").exists()

    @pytest.mark.parametrize(
        ("words", "says"), [([], "--keep FILE would keep"), (["--keep", "r.jsonl"], "are in r.jsonl")]
    )
    def test_an_interruption_tells_how_to_go_on(self, words: list[str], says: str) -> None:
        done = CliRunner().invoke(app, ["parity", "programs:stops", "--no-controls", *words])
        assert done.exit_code == 130
        assert says in done.stderr

    def test_what_train_prints_is_not_in_the_json(self) -> None:
        done = CliRunner().invoke(app, ["parity", "programs:talks", "--seeds", "3", "--no-controls", "--json", "-"])
        assert json.loads(done.stdout)["verdict"] == "equivalent"
        assert "talk" in done.stderr

    def test_json_and_options_of_a_mapping(self, tmp_path: Path) -> None:
        words = ["parity", "programs:ignored", "--json", "o.json", "--policy", "mixed_bfloat16", "--no-controls"]
        assert CliRunner().invoke(app, words).exit_code == 0
        read = json.loads((tmp_path / "o.json").read_text())
        assert (read["seeds"], read["comparisons"][0]["margin"]) == (3, 0.5)
        assert [one["policy"] for one in read["comparisons"]] == ["mixed_bfloat16"]

    def test_every_option_reaches_parity(self, tmp_path: Path) -> None:
        words = "--metric steps --better higher --alpha 0.1 --no-stop-early --seeds 6 --first-seed 7 --no-controls"
        files = "--keep runs.jsonl --json o.json --margin 5%"
        assert CliRunner().invoke(app, ["parity", "programs:good", *words.split(), *files.split()]).exit_code == 0
        read = json.loads((tmp_path / "o.json").read_text())
        chosen = {"metric": "steps", "better": "higher", "alpha": 0.1, "stop_early": False, "seeds": 6, "controls": []}
        assert {name: read[name] for name in chosen} == chosen
        assert [run["seed"] for run in read["float32"]["runs"]] == list(range(7, 13))
        assert read["comparisons"][0]["margin"] == pytest.approx(0.35)
        assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 12
