"""Parity: statistics, looks, verdicts and their error rates, forms of training, kept runs, controls."""

import functools
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import polyamp
from polyamp.diagnosis.comparison import Comparison, Question, Run
from polyamp.diagnosis.equivalence import alpha_at, paired
from polyamp.diagnosis.parity import add_run, better_of, read_runs
from polyamp.errors import (
    InvalidTypeError,
    InvalidValueError,
    MissingFrameworkError,
    NonFiniteLossError,
    PolyampWarning,
    UsageError,
    warn_once,
)
from support.seeded_runs import compared, quiet, task

ROOT = Path(__file__).parents[2]
numbers = st.floats(-5, 5).map(lambda x: round(x, 3))
lists = st.integers(3, 12).flatmap(lambda n: st.tuples(*(st.lists(numbers, min_size=n, max_size=n) for _ in range(2))))


def ended(values: Sequence[float], **asked: Any) -> str:
    """Look at growing numbers of seeds, as training does, and return the first clear verdict."""
    looks = (compared(values[:seen], **asked).verdict for seen in range(3, len(values) + 1))
    return next((verdict for verdict in looks if verdict != "not yet known"), "not yet known")


class TestStatistics:
    @given(lists, st.floats(0.01, 3.0))
    def test_paired_is_scipys_paired_test(self, pair: tuple[list[float], list[float]], margin: float) -> None:
        differences = np.subtract(*pair)
        if np.ptp(differences) < 1e-6:
            return
        found, expected = paired(differences.tolist(), alpha=0.05), stats.ttest_rel(*pair)
        interval = expected.confidence_interval(0.90)
        assert (found.low, found.high) == pytest.approx((interval.low, interval.high), abs=1e-9)
        lower = stats.ttest_1samp(differences, -margin, alternative="greater").pvalue
        upper = stats.ttest_1samp(differences, margin, alternative="less").pvalue
        p = max(lower, upper)
        assert found.p_equivalent(margin) == pytest.approx(p, abs=1e-9)
        if abs(p - 0.05) > 1e-9:
            assert found.within(margin) == (p < 0.05)

    def test_equal_differences_have_an_interval_of_one_point(self) -> None:
        found = paired([0.5] * 3, alpha=0.05)
        assert (found.low, found.high, found.p_equivalent(1.0), found.p_equivalent(0.5)) == (0.5, 0.5, 0.0, 1.0)
        many = paired([0.000806559297175622] * 20, alpha=0.05)
        assert (many.mean, many.error) == (0.000806559297175622, 0.0)


class TestLooks:
    @pytest.mark.once
    @pytest.mark.parametrize(
        ("noise", "spread", "stop_early"),
        [
            ("normal", 0.3, True),
            ("normal", 1.0, True),
            ("normal", 1.0, False),
            ("heavy tails", 1.0, True),
            ("rounded", 1.0, True),
        ],
    )
    def test_a_wrong_verdict_is_as_rare_as_stated(self, noise: str, spread: float, stop_early: bool) -> None:
        """The hardest case for both errors is a true difference that is exactly as large as the margin."""
        random, draws = np.random.default_rng(1), 400
        made = {
            "normal": lambda shape: random.normal(size=shape),
            "heavy tails": lambda shape: random.standard_t(3, size=shape) / math.sqrt(3),
            "rounded": lambda shape: np.round(random.normal(size=shape)),
        }[noise]((draws, 10))
        found = Counter(ended(list(row), stop_early=stop_early) for row in 1.0 + spread * made)
        for wrong in ("equivalent", "worse"):
            assert found[wrong] <= draws * 0.05 + 3 * math.sqrt(draws * 0.05 * 0.95), found
        assert found["better"] == 0

    def test_the_page_has_the_rates_that_were_drawn(self) -> None:
        drawn = json.loads((ROOT / "benchmarks" / "results" / "parity_errors.json").read_text())
        page = (ROOT / "docs" / "diagnose" / "parity.md").read_text()
        shown = [line.replace("*", "") for line in page.splitlines() if line.startswith("|")]
        wanted = {
            "normal": "normal",
            "heavy tails (t, 3 degrees)": "with heavy tails",
            "rounded to the deviation": "rounded",
            "skewed to worse": "a few runs much worse",
            "skewed to better": "a few runs much better",
        }
        rows = [row for row in drawn["rows"] if row["true difference"] == "the margin" and row["deviation"] == 1.0]
        for row in rows:
            if row["differences"] in wanted:
                (line,) = (line for line in shown if wanted[row["differences"]] in line)
                read = [float(cell.strip(" %")) for cell in line.split("|")[2:4]]
                drawn_rates = [100 * row[verdict] for verdict in ("equivalent", "worse")]
                assert read == pytest.approx(drawn_rates, abs=0.51 if max(drawn_rates) > 10 else 0.051), line


class TestVerdict:
    @pytest.mark.parametrize(
        ("values", "better", "verdict"),
        [
            ([0.01, -0.02, 0.0, 0.02, -0.01], "lower", "equivalent"),
            ([3.0, 3.1, 2.9, 3.0, 3.05], "lower", "worse"),
            ([3.0, 3.1, 2.9, 3.0, 3.05], "higher", "better"),
            ([-3.0, -3.1, -2.9, -3.0, -3.05], "higher", "worse"),
            ([1.0, -2.0, 3.0, -1.0, 0.5], "lower", "not yet known"),
            ([0.0, math.nan, 0.0, 0.0, 0.0], "lower", "worse"),
            ([0.0, 0.0, math.inf], "higher", "worse"),
        ],
    )
    def test_of_five_seeds(self, values: list[float], better: Any, verdict: str) -> None:
        found = compared(values, seeds=5, better=better)
        assert found.verdict == verdict
        json.dumps(found.as_dict(), allow_nan=False)

    def test_no_early_look_finds_two_ways_equivalent_by_chance(self) -> None:
        assert compared([0.01, -0.01, 0.0]).verdict == "not yet known"  # too few to see a rare bad run
        assert compared([0.0] * 6).verdict == "not yet known"  # equal so far: accuracies are rounded
        assert compared([0.0] * 9 + [1.0], [0.0] * 9 + [1.0]).verdict == "equivalent"

    def test_float32_that_diverges_is_not_held_against_the_policy(self) -> None:
        for values in ([1.0] * 3, [1.0, math.nan, 1.0]):
            found = compared(values, [1.0, math.nan, 1.0], seeds=3)
            assert found.verdict == "not yet known"
            assert found.reason == "float32 itself ended without a finite loss: 1 of 3 runs (seed 1)"

    def test_a_share_is_that_of_float32(self) -> None:
        far = compared([9.0] * 3, [4.0] * 3, margin=0.5, is_share=True, seeds=3)
        assert (far.limit, far.mean) == (2.0, 9.0)
        of_zero = compared([0.0, 0.1, 0.0], margin=0.05, is_share=True, seeds=3)
        assert of_zero.verdict == "not yet known"
        assert "state it as a number" in of_zero.reason

    def test_equal_runs_are_one_draw_and_show_no_equivalence(self) -> None:
        """Without any spread over the seeds there is no estimate of it. A collapse is worse all the same."""
        found = compared([0.1] * 10)
        assert (found.verdict, found.more_seeds) == ("not yet known", None)
        assert "does train use its seed?" in found.reason
        assert compared([3.0] * 10).verdict == "worse"
        spread = [0.1 * place for place in range(10)]
        assert compared(spread, spread).verdict == "equivalent"

    def test_an_equal_metric_is_no_sign_of_a_policy_without_effect_if_another_one_differs(self) -> None:
        float32, low = (
            tuple(Run(seed, {"accuracy": 0.9, "loss": seed + more}) for seed in range(5)) for more in (0.0, 0.01)
        )
        for runs, says in (
            (float32, "every seed has the value of float32, as if the policy were not in effect"),
            (low, ""),
        ):
            found = Comparison("p", runs, float32, Question(0.1, metric="accuracy", better="higher", seeds=5))
            assert (found.verdict, found.reason) == ("equivalent", says)

    @pytest.mark.parametrize(
        ("name", "better"),
        [
            ("val/top1", "higher"),
            ("error_rate", "lower"),
            ("mAP@50", "higher"),
            ("Cohen kappa", "higher"),
            ("accuracy_loss", "lower"),  # the last word decides
            ("loss_score", "higher"),
        ],
    )
    def test_the_name_of_a_metric_tells_which_is_better(self, name: str, better: str) -> None:
        assert better_of(name) == better


class TestTraining:
    def test_it_stops_as_soon_as_the_answer_is_clear(self) -> None:
        calls: list[Any] = []
        early = quiet(task(calls=calls)).comparisons[0]
        assert (early.seeds, len(calls)) == (5, 10)
        assert early.as_dict()["coverage"] == 1 - 2 * alpha_at(5, 10, 0.05, True)  # type: ignore[operator]
        assert quiet(task(), stop_early=False).comparisons[0].seeds == 10
        assert quiet(task(lambda policy: (policy.compute == "float16") * 0.5)).comparisons[0].seeds == 3

    def test_every_policy_has_its_own_verdict(self) -> None:
        found = quiet(task(lambda policy: (policy.compute == "bfloat16") * 0.1), ["mixed_float16", "mixed_bfloat16"])
        assert [one.verdict for one in found.comparisons] == ["equivalent", "worse"]
        assert found.verdict == "worse"
        assert not found
        assert "mixed_bfloat16 is worse than float32 by more than the margin." in str(found)

    def test_not_yet_known_comes_with_the_seeds_that_would_tell(self) -> None:
        found = quiet(task(noise=0.02), seeds=4)
        assert found.verdict == "not yet known"
        assert found.comparisons[0].more_seeds > 4
        assert f"about {found.comparisons[0].more_seeds} seeds would tell; take new ones, from seed 4" in str(found)

    def test_a_run_that_fails_under_the_policy_is_worse(self) -> None:
        def train(policy: polyamp.Policy, seed: int) -> float:
            if policy.compute == "float16" and seed == 1:
                raise NonFiniteLossError("the loss is not finite", where="step 3", found="nan", fix="look")
            return 1.0 + seed

        said = "it ended without a finite value: 1 of {} (seed {}): the loss is not finite"
        found = quiet(train)
        assert found.verdict == "worse"
        assert said.format("2 runs", 1) in str(found)

    def test_errors_of_train_itself_propagate(self) -> None:
        def train(policy: polyamp.Policy, seed: int) -> float:
            raise NonFiniteLossError("the loss is not finite", where="step 3", found="nan", fix="look")

        with pytest.raises(NonFiniteLossError):
            quiet(train)
        with pytest.raises(ZeroDivisionError) as raised:
            quiet(lambda policy, seed: 1 / (policy.compute == "float32"))
        assert raised.value.__notes__ == [
            "in polyamp.parity, seed 0, mixed_float16; if training diverged, return NaN as the metric"
        ]
        with pytest.raises(UsageError, match=r"sys\.exit\(0\)"):  # not taken for a verdict
            quiet(lambda policy, seed: sys.exit(0))

    def test_nothing_more_is_trained_once_float32_diverged(self) -> None:
        calls: list[Any] = []

        def train(policy: polyamp.Policy, seed: int) -> float:
            calls.append(seed)
            return math.nan

        found = quiet(train, controls=True)
        assert calls == [0] * 4  # float32, the policy and its controls
        assert "cannot tell" not in str(found)

    def test_each_run_starts_in_the_current_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

        def train(policy: polyamp.Policy, seed: int) -> float:
            Path("inside").mkdir(exist_ok=True)
            os.chdir("inside")
            return 1.0 + seed

        quiet(train, keep="runs.jsonl", seeds=3)
        assert sorted(path.name for path in tmp_path.rglob("*")) == ["inside", "runs.jsonl"]
        assert Path.cwd() == tmp_path

    @pytest.mark.parametrize(
        "train",
        [
            lambda seed, policy: 1.0 + seed * (polyamp.current_policy() == policy),
            lambda seed: 1.0 + seed,
            lambda p, s: 1.0 + s,
            lambda *, seed, policy: 1.0 + seed * (polyamp.current_policy() == policy),
            lambda seed, steps=3, *rest, **options: 1.0 + seed + len(options),
            functools.partial(lambda model, policy, seed: model + seed, 1.0),
        ],
    )
    def test_forms_of_train(self, train: Any) -> None:
        assert quiet(train, seeds=3).comparisons[0].seeds == 3

    @pytest.mark.parametrize(
        "train", [3, lambda: 1.0, lambda policy, seed, more: 1.0, lambda a, b, c: 1.0, lambda s, policy: 1.0]
    )
    def test_what_is_not_such_a_function_is_refused(self, train: Any) -> None:
        with pytest.raises(InvalidTypeError, match="train\\(policy, seed\\)"):
            quiet(train)

    @pytest.mark.parametrize(
        "made",
        [None, "0.9", True, {}, {"loss": None}, (1.0, 2.0, 3.0), (1.0, "adam")],
    )
    def test_a_result_without_a_metric_is_refused(self, made: Any) -> None:
        with pytest.raises(InvalidTypeError, match="train returned no metric"):
            quiet(lambda seed: made)
        with pytest.raises(InvalidTypeError, match="what is not a number: history, model"):
            quiet(lambda seed: {"loss": 1.0, "history": [3.0, 1.0], "model": "tanh"})

    def test_the_metric_and_its_direction_can_be_chosen(self) -> None:
        made = {"loss": 1.0, "gain": 2.0}
        asked = quiet(lambda seed: made, metric="gain", better="higher").question
        assert (asked.metric, asked.better) == ("gain", "higher")
        with pytest.raises(InvalidValueError, match="no such metric"):
            quiet(lambda seed: made, metric="accuracy")

    def test_a_metric_of_unknown_direction_is_refused_before_training_and_else_costs_no_run(
        self, tmp_path: Path
    ) -> None:
        calls: list[int] = []

        def train(seed: int) -> dict[str, float]:
            calls.append(seed)
            return {"gain": 1.0 + seed}

        with pytest.raises(InvalidValueError, match="whether a higher or a lower value"):
            quiet(train, metric="gain")
        assert not calls
        with pytest.raises(InvalidValueError, match="whether a higher or a lower value"):
            quiet(train, keep=tmp_path / "runs.jsonl", seeds=3)
        quiet(train, keep=tmp_path / "runs.jsonl", better="higher", seeds=3)
        assert calls == [0, 0, 1, 1, 2, 2]

    @pytest.mark.parametrize(
        "options",
        [
            {"seeds": 2},
            {"seeds": True},
            {"alpha": 0},
            {"alpha": 0.6},
            {"policy": "float32"},
            {"policy": []},
            {"first_seed": 0.5},
            *({"margin": margin} for margin in ("", "much", "0%", "-1%", 0, math.nan, math.inf, True, None)),
        ],
    )
    def test_bad_arguments_are_refused_before_anything_is_trained(self, options: dict[str, Any]) -> None:
        calls: list[Any] = []
        with pytest.raises((InvalidValueError, InvalidTypeError)):
            quiet(task(calls=calls), **options)
        assert not calls

    def test_without_scipy_the_extra_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "scipy.stats", None)
        with pytest.raises(MissingFrameworkError, match=r"polyamp\[parity\]"):
            quiet(task())


class TestKeep:
    def test_an_interrupted_parity_goes_on_where_it_stopped(self, tmp_path: Path) -> None:
        kept, calls, limit = tmp_path / "runs.jsonl", list[Any](), [5]
        whole = task(calls=calls)

        def train(policy: polyamp.Policy, seed: int) -> dict[str, float]:
            if len(calls) in limit:
                raise KeyboardInterrupt
            return whole(policy, seed)

        with pytest.raises(KeyboardInterrupt):
            quiet(train, keep=kept)
        calls.clear()
        limit.clear()
        said: list[str] = []
        found = quiet(train, keep=kept, progress=lambda done, total, text: said.append(f"{done}/{total} {text}"))
        assert len(calls) == 5
        assert said[0].startswith("1/20 seed 0, float32: ")
        assert [text.endswith(" (kept)") for text in said] == [True] * 5 + [False] * 5
        assert found.as_dict() | {"name": ""} == quiet(whole).as_dict() | {"name": ""}
        calls.clear()
        assert str(quiet(train, keep=kept)) == str(found)
        assert not calls

    def test_functions_and_policies_do_not_take_each_others_runs(self, tmp_path: Path) -> None:
        kept, calls = tmp_path / "runs.jsonl", list[Any]()
        slow, fast = (functools.partial(lambda rate, policy, seed: rate + seed, rate) for rate in (1.0, 5.0))
        assert [quiet(train, keep=kept, seeds=3).ways[0].mean for train in (slow, fast)] == [2.0, 6.0]
        others = [{}, {"loss_scale": 8}, {"rules": {"softmax": "lower"}}]
        policies = [polyamp.policy("mixed_float16", **more) for more in others]
        for _ in range(2):
            quiet(task(calls=calls), policies, keep=kept, seeds=3)
        assert Counter(Counter(name for name, _ in calls).values()) == {3: 4}

    @given(
        st.builds(
            Run,
            seed=st.integers(0, 99),
            metrics=st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False)),
            skipped=st.none() | st.integers(0, 9),
            failure=st.text(),
        )
    )
    def test_all_of_a_run_is_kept(self, tmp_path_factory: pytest.TempPathFactory, run: Run) -> None:
        path, key = tmp_path_factory.mktemp("kept") / "runs.jsonl", ("m:train", "mixed_float16", run.seed)
        add_run(path, key, run)
        assert read_runs(path) == {key: run}
        assert path.read_text().count("\n") == 1

    @pytest.mark.parametrize("cut", [1, 5, 30, -1])
    def test_damaged_lines_are_named_and_skipped(self, tmp_path: Path, cut: int) -> None:
        path = tmp_path / "runs.jsonl"
        for seed in range(3):
            add_run(path, ("m:train", "p", seed), Run(seed, {"loss": 0.5}))
        first, second, third = path.read_text().splitlines()
        second = {1: second.replace("0.5", "1" * 400), 5: "[" * 100_000}.get(cut, second.replace("metrics", "m"))
        path.write_text(f"{first}\n{second}\n{third[:cut]}")  # the process was killed
        with pytest.warns(PolyampWarning, match=r"runs\.jsonl: skipped what is not a whole run, in line 2, 3;"):
            assert [key[-1] for key in read_runs(path)] == [0]
        add_run(path, ("m:train", "p", 2), Run(2, {"loss": 0.5}))
        assert [key[-1] for key in read_runs(path)] == [0, 2]  # and warns once of one text

    @pytest.mark.parametrize("text", ["my notes\n", '{"name": "x"}\n', "[1]\n", "7", "\n"])
    def test_a_file_of_something_else_is_refused(self, tmp_path: Path, text: str) -> None:
        kept = tmp_path / "notes.txt"
        kept.write_text(text)
        with pytest.raises(InvalidValueError, match="is not a file of runs"):
            quiet(task(), keep=kept)
        assert kept.read_text() == text if text.endswith("\n") else f"{text}\n"

    def test_a_file_that_cannot_be_written_is_refused_before_anything_is_trained(self, tmp_path: Path) -> None:
        calls: list[Any] = []
        for path in (tmp_path, tmp_path / "none" / "runs.jsonl", Path("/dev/full")):
            with pytest.raises(InvalidValueError, match="cannot be written"):
                quiet(task(calls=calls), keep=path)
        assert not calls


class TestControls:
    def test_they_are_the_policy_made_worse(self) -> None:
        seen: dict[polyamp.Policy, int] = {}

        def train(policy: polyamp.Policy, seed: int) -> float:
            seen[policy] = seed
            if policy.rules:
                warn_once(f"broken on purpose, with seed {seed}")  # which is not for the user
            return 1.0 + seed

        quiet(train, ["mixed_float16", "mixed_bfloat16"], controls=True, seeds=3)
        assert [(one.compute, one.loss_scale.scales, dict(one.rules)) for one in seen] == [
            ("float32", False, {}),
            ("float16", True, {}),
            ("float16", False, {}),
            ("float16", True, {"*": "lower"}),
            ("bfloat16", False, {}),
            ("bfloat16", False, {"*": "lower"}),
        ]

    def test_they_are_not_trained_on_once_their_policy_has_failed(self) -> None:
        seeds: list[int] = []

        def train(policy: polyamp.Policy, seed: int) -> float:
            if policy.rules:
                seeds.append(seed)
                return 2.0 + seed + seed % 3
            return 2.0 + seed + (5.0 + 0.01 * seed) * (policy.compute == "float16")

        found = quiet(train, controls=True)
        assert found.verdict == "worse"
        assert found.comparisons[0].seeds == 3
        assert max(seeds) == 2
