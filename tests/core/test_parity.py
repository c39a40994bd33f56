"""Parity: statistics, looks, verdicts and their error rates, forms of training, kept runs, controls."""

from __future__ import annotations

import functools
import json
import math
import os
import runpy
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import polyamp
from polyamp.controls import active, imposed
from polyamp.equivalence.comparison import Comparison, Margin
from polyamp.equivalence.design import Design
from polyamp.equivalence.journal import Journal
from polyamp.equivalence.statistics import Difference, paired, seeds_to_tell, unpaired
from polyamp.equivalence.training import Metric, Run, better_of
from polyamp.errors import (
    InvalidTypeError,
    InvalidValueError,
    MissingFrameworkError,
    NonFiniteLossError,
    PolyampWarning,
    UsageError,
    warn_once,
)
from support.seeded_runs import LOSS, compared, quiet, runs, task

ROOT = Path(__file__).parents[2]
numbers = st.floats(-5, 5).map(lambda x: round(x, 3))
lists = st.integers(3, 12).flatmap(lambda n: st.tuples(*(st.lists(numbers, min_size=n, max_size=n) for _ in range(2))))


def ended(values: Sequence[float], design: Design) -> str:
    """Look at growing numbers of seeds, as training does, and return the first clear verdict."""
    for seen in range(3, len(values) + 1):
        found = compared(values[:seen], design.seeds)
        if found.is_decided:
            return found.verdict
    return "not yet known"


class TestStatistics:
    @given(lists)
    def test_paired_is_scipys_paired_test(self, pair: tuple[list[float], list[float]]) -> None:
        differences = np.subtract(*pair)
        if np.ptp(differences) < 1e-6:
            return
        found, expected = paired(*pair, alpha=0.05), stats.ttest_rel(*pair)
        interval = expected.confidence_interval(0.90)
        assert found.low == pytest.approx(interval.low, abs=1e-9)
        assert found.high == pytest.approx(interval.high, abs=1e-9)
        lower = stats.ttest_1samp(differences, -0.7, alternative="greater").pvalue
        upper = stats.ttest_1samp(differences, 0.7, alternative="less").pvalue
        assert found.p_equivalent(0.7) == pytest.approx(max(lower, upper), abs=1e-9)

    @given(st.lists(numbers, min_size=3, max_size=9), st.lists(numbers, min_size=3, max_size=9))
    def test_unpaired_is_scipys_test_of_welch(self, one: list[float], other: list[float]) -> None:
        if min(np.ptp(one), np.ptp(other)) < 1e-2:
            return
        found, expected = unpaired(one, other, alpha=0.05), stats.ttest_ind(one, other, equal_var=False)
        interval = expected.confidence_interval(0.90)
        assert (found.low, found.high) == pytest.approx((interval.low, interval.high), abs=1e-8)
        assert found.freedom == pytest.approx(expected.df)

    @given(lists, st.floats(0.01, 3.0))
    def test_the_interval_is_within_the_margin_where_both_tests_reject(
        self, pair: tuple[list[float], list[float]], margin: float
    ) -> None:
        found = paired(*pair, alpha=0.05)
        p = found.p_equivalent(margin)
        if abs(p - 0.05) > 1e-9:
            assert found.within(margin) == (p < 0.05)

    def test_equal_differences_have_an_interval_of_one_point(self) -> None:
        found = paired([1.0, 2.0, 3.0], [0.5, 1.5, 2.5], alpha=0.05)
        assert (found.low, found.high, found.p_equivalent(1.0), found.p_equivalent(0.5)) == (0.5, 0.5, 0.0, 1.0)
        many = paired([0.000806559297175622] * 20, [0.0] * 20, alpha=0.05)
        assert (many.mean, many.error) == (0.000806559297175622, 0.0)

    def test_the_planned_seeds_tell_four_times_in_five(self) -> None:
        mean, deviation, margin = 0.3, 1.0, 1.0
        first = Difference(mean, deviation / math.sqrt(5), 4, 0.05)
        planned = seeds_to_tell(first, margin, 5)
        assert planned is not None
        random = np.random.default_rng(0)
        draws = random.normal(mean, deviation, (400, planned))
        told = [paired(list(row), [0.0] * planned, alpha=0.05).within(margin) for row in draws]
        assert 0.72 < np.mean(told) < 0.92

    def test_no_number_of_seeds_tells_a_difference_as_large_as_the_margin(self) -> None:
        assert seeds_to_tell(Difference(1.0, 0.1, 9, 0.05), 1.0, 10) is None


class TestDesign:
    @given(st.integers(3, 60), st.floats(0.001, 0.4), st.booleans())
    def test_all_looks_together_have_alpha(self, seeds: int, alpha: float, stop_early: bool) -> None:
        design = Design(seeds, alpha, stop_early)
        spent = [design.alpha_at(seen) for seen in range(seeds + 1)]
        assert sum(one for one in spent if one) == pytest.approx(alpha)
        assert spent[-1] is not None
        assert stop_early or not any(spent[:-1])

    @pytest.mark.parametrize("stop_early", [True, False])
    @pytest.mark.parametrize("spread", [0.3, 1.0])
    @pytest.mark.parametrize("noise", ["normal", "heavy tails", "rounded"])
    def test_a_wrong_verdict_is_as_rare_as_stated(self, noise: str, spread: float, stop_early: bool) -> None:
        """The hardest case for both errors is a true difference that is exactly as large as the margin."""
        random, draws = np.random.default_rng(1), 400
        made = {
            "normal": lambda shape: random.normal(size=shape),
            "heavy tails": lambda shape: random.standard_t(3, size=shape) / math.sqrt(3),
            "rounded": lambda shape: np.round(random.normal(size=shape)),
        }[noise]((draws, 10))
        found = Counter(ended(list(row), Design(10, 0.05, stop_early)) for row in 1.0 + spread * made)
        for wrong in ("equivalent", "worse"):
            assert found[wrong] <= draws * 0.05 + 3 * math.sqrt(draws * 0.05 * 0.95), found
        assert found["better"] == 0

    def test_what_is_equal_is_found_equivalent_and_what_is_far_is_found_worse(self) -> None:
        random = np.random.default_rng(2)
        equal = Counter(ended(list(row), Design(10, 0.05)) for row in random.normal(0, 0.3, (200, 10)))
        far = Counter(ended(list(row), Design(10, 0.05)) for row in random.normal(2, 0.5, (200, 10)))
        assert equal["equivalent"] > 195
        assert far["worse"] > 195

    def test_without_the_design_a_verdict_would_be_wrong_too_often(self) -> None:
        """If every look had the whole error rate, the first verdict that is clear would often be wrong."""
        random, draws = np.random.default_rng(3), 400
        wrong = 0
        for row in random.normal(1.0, 0.3, (draws, 10)):
            wrong += any(paired(list(row[:n]), [0.0] * n, alpha=0.05).within(1.0) for n in range(3, 11))
        assert wrong > draws * 0.10

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
        reference = runs([0.0] * len(values))
        design, metric = Design(5, 0.05), Metric("value", better)
        found = Comparison("p", runs(values), reference, metric, Margin(1.0), design)
        assert found.verdict == verdict
        json.dumps(found.as_dict(), allow_nan=False)

    def test_no_early_look_finds_two_ways_equivalent_by_chance(self) -> None:
        assert compared([0.01, -0.01, 0.0]).verdict == "not yet known"  # too few to see a rare bad run
        assert compared([0.0] * 6).verdict == "not yet known"  # equal so far: accuracies are rounded
        first = runs([0.0] * 9 + [1.0])
        assert Comparison("p", first, first, LOSS, Margin(1.0), Design(10, 0.05)).verdict == "equivalent"

    def test_float32_that_diverges_is_not_held_against_the_policy(self) -> None:
        for values in ([1.0] * 3, [1.0, math.nan, 1.0]):
            found = Comparison("p", runs(values), runs([1.0, math.nan, 1.0]), LOSS, Margin(1.0), Design(3, 0.05))
            assert found.verdict == "not yet known"
            assert found.reason == "float32 itself ended without a finite loss: 1 of 3 runs (seed 1)"

    def test_a_share_of_a_mean_of_0_is_no_margin(self) -> None:
        found = replace(compared([0.0, 0.1, 0.0], seeds=3), margin=Margin.of("5%"))
        assert found.verdict == "not yet known"
        assert "state it as a number" in found.reason

    def test_a_share_is_that_of_float32(self) -> None:
        far = Comparison("p", runs([9.0] * 3), runs([4.0] * 3), LOSS, Margin.of("50%"), Design(3, 0.05))
        assert (far.limit, far.mean) == (2.0, 9.0)

    def test_separate_runs_are_equivalent_or_worse_too(self) -> None:
        reference = runs([0.0, 0.1, -0.1, 0.2])
        near, far = (
            Comparison("p", runs(values), reference, LOSS, Margin(1.0), Design(3, 0.05), is_paired=False)
            for values in ([0.0, 0.1, -0.1], [3.0, 3.1, 2.9])
        )
        assert (near.verdict, near.reason, far.verdict) == ("equivalent", "", "worse")

    def test_equal_runs_are_one_draw_and_show_no_equivalence(self) -> None:
        """Without any spread over the seeds there is no estimate of it. A collapse is worse all the same."""
        found = compared([0.1] * 10)
        assert (found.verdict, found.more_seeds) == ("not yet known", None)
        assert "does train use its seed?" in found.reason
        assert compared([3.0] * 10).verdict == "worse"
        spread = runs([0.1 * place for place in range(10)])
        assert Comparison("p", spread, spread, LOSS, Margin(1.0), Design(10, 0.05)).verdict == "equivalent"

    def test_an_equal_metric_is_no_sign_of_a_policy_without_effect_if_another_one_differs(self) -> None:
        float32, low = (
            tuple(Run(seed, 0.9, {"accuracy": 0.9, "loss": seed + more, "runtime": more}) for seed in range(5))
            for more in (0.0, 0.01)
        )
        slow = tuple(run._replace(metrics={**run.metrics, "runtime": 9.0}) for run in float32)
        for values, says in ((slow, "as if the policy were not in effect"), (low, "")):
            found = Comparison("p", values, float32, Metric("accuracy", "higher"), Margin(0.1), Design(5, 0.05))
            assert found.verdict == "equivalent"
            assert says in found.reason
            assert bool(found.reason) == bool(says)

    @pytest.mark.parametrize("given", ["", "much", "0%", "-1%", 0, -0.1, math.nan, math.inf, True, None])
    def test_a_margin_that_is_none_is_refused(self, given: Any) -> None:
        with pytest.raises(InvalidValueError, match="largest difference that would not matter"):
            Margin.of(given)

    def test_a_margin_is_a_number_or_a_share(self) -> None:
        assert Margin.of("0.5%").at(-4.0) == Margin.of("0.02").at(-4.0) == Margin.of(0.02).at(-4.0) == 0.02

    @pytest.mark.parametrize(
        ("name", "better"),
        [
            ("accuracy", "higher"),
            ("val/top1", "higher"),
            ("error_rate", "lower"),
            ("average_precision", "higher"),
            ("mAP@50", "higher"),
            ("val_cross_entropy", "lower"),
            ("Cohen kappa", "higher"),
            ("accuracy_loss", "lower"),  # the last word decides
            ("loss_score", "higher"),
        ],
    )
    def test_the_name_of_a_metric_tells_which_is_better(self, name: str, better: str) -> None:
        assert better_of(name) == better


class TestTraining:
    def test_pairs_find_what_separate_runs_could_not(self) -> None:
        found = quiet(task())
        alone = quiet(task(), reference=[run.value for run in found.float32])
        assert (found.verdict, alone.verdict) == ("equivalent", "not yet known")
        assert alone.comparisons[0].more_seeds > 100

    def test_it_stops_as_soon_as_the_answer_is_clear(self) -> None:
        calls: list[Any] = []
        assert quiet(task(calls=calls)).comparisons[0].seeds == 5
        assert len(calls) == 10
        early = quiet(task()).comparisons[0]
        assert early.as_dict()["coverage"] == 1 - 2 * Design(10, 0.05).alpha_at(5)  # type: ignore[operator]
        assert quiet(task(), stop_early=False).comparisons[0].seeds == 10
        assert quiet(task(lambda policy: (policy.compute == "float16") * 0.5)).comparisons[0].seeds == 3

    def test_every_policy_has_its_own_verdict(self) -> None:
        found = quiet(task(lambda policy: (policy.compute == "bfloat16") * 0.1), ["mixed_float16", "mixed_bfloat16"])
        assert [one.verdict for one in found.comparisons] == ["equivalent", "worse"]
        assert found.verdict == "worse"
        assert not found
        assert "mixed_bfloat16 is worse than float32 by more than the margin." in str(found)

    def test_the_same_seeds_in_every_way(self) -> None:
        calls: list[Any] = []
        quiet(task(calls=calls), seeds=4, first_seed=30, stop_early=False)
        assert sorted(calls) == sorted((name, seed) for name in ("float32", "mixed_float16") for seed in range(30, 34))

    def test_not_yet_known_comes_with_the_seeds_that_would_tell(self) -> None:
        found = quiet(task(noise=0.02), seeds=4)
        assert found.verdict == "not yet known"
        assert found.comparisons[0].more_seeds > 4
        assert f"about {found.comparisons[0].more_seeds} seeds would tell; take new ones, from seed 4" in str(found)

    def test_a_policy_without_effect_is_noticed(self) -> None:
        found = quiet(lambda seed: seed / 10 + 1)
        assert "every seed has the value of float32, as if the policy were not in effect" in str(found)

    def test_a_seed_without_effect_is_noticed(self) -> None:
        found = quiet(lambda policy, seed: 1.0)
        assert "for every seed: does train use its seed?" in str(found)
        assert found.verdict == "not yet known"

    def test_a_run_that_fails_under_the_policy_is_worse(self) -> None:
        def train(policy: polyamp.Policy, seed: int) -> float:
            if policy.compute == "float16" and seed == 1:
                raise NonFiniteLossError("the loss is not finite", where="step 3", found="nan", fix="look")
            return 1.0 + seed

        found = quiet(train)
        assert found.verdict == "worse"
        assert "(seed 1): the loss is not finite" in found.comparisons[0].reason

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

    def test_the_exit_code_of_train_is_not_taken_for_a_verdict(self) -> None:
        with pytest.raises(UsageError, match=r"sys\.exit\(0\)"):
            quiet(lambda policy, seed: sys.exit(0))

    def test_nothing_more_is_trained_once_float32_diverged(self) -> None:
        calls: list[Any] = []

        def train(policy: polyamp.Policy, seed: int) -> float:
            calls.append(seed)
            return math.nan

        found = quiet(train, controls=True)
        assert calls == [0] * 5  # float32 twice, the policy and its controls
        assert "float32 with seed 0, twice: not finite." in str(found)
        assert "cannot tell" not in str(found)

    def test_a_run_that_diverged_is_not_said_to_be_worse_by_a_number(self) -> None:
        found = quiet(lambda policy, seed: math.inf if policy.compute == "float16" else 1.0)
        assert "mixed_float16 is worse than float32: it ended without a finite value: 1 of 1 run (seed 0)." in str(
            found
        )

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
            lambda policy, seed: 1.0,
            lambda seed, policy: 1.0 + seed * (polyamp.current_policy() == policy),
            lambda seed: 1.0 + seed,
            lambda policy, seed, steps=3: 1.0,
            lambda p, s: 1.0 + s,
            lambda *, seed, policy: 1.0 + seed * (polyamp.current_policy() == policy),
            lambda seed, steps=3, *rest, **options: 1.0 + seed,
            functools.partial(lambda model, policy, seed: model + seed, 1.0),
        ],
    )
    def test_forms_of_train(self, train: Any) -> None:
        assert quiet(train, seeds=3).comparisons[0].seeds == 3

    @pytest.mark.parametrize("train", [3, lambda: 1.0, lambda policy, seed, more: 1.0, lambda a, b, c: 1.0])
    def test_what_is_not_such_a_function_is_refused(self, train: Any) -> None:
        with pytest.raises(InvalidTypeError, match="train\\(policy, seed\\)"):
            quiet(train)

    def test_what_is_not_a_number_is_named(self) -> None:
        with pytest.raises(InvalidTypeError, match="what is not a number: history, model"):
            quiet(lambda seed: {"loss": 1.0, "history": [3.0, 1.0], "model": "tanh"})

    @pytest.mark.parametrize(
        "made",
        [None, "0.9", True, {}, {"loss": None}, [], (1.0, 2.0, 3.0), (np.float32(1), np.float32(2)), (1.0, "adam")],
    )
    def test_a_result_without_a_metric_is_refused(self, made: Any) -> None:
        with pytest.raises(InvalidTypeError, match="train returned no metric"):
            quiet(lambda seed: made)

    def test_the_metric_and_its_direction_can_be_chosen(self) -> None:
        made = {"loss": 1.0, "gain": 2.0}
        with pytest.raises(InvalidValueError, match="whether a higher or a lower value"):
            quiet(lambda seed: made, metric="gain")
        assert quiet(lambda seed: made, metric="gain", better="higher").ways[0].metric == Metric("gain", "higher")
        with pytest.raises(InvalidValueError, match="no such metric"):
            quiet(lambda seed: made, metric="accuracy")

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
            {"reference": [1.0]},
            {"reference": [1.0, math.nan]},
            {"margin": "x"},
        ],
    )
    def test_bad_arguments_are_refused_before_anything_is_trained(self, options: dict[str, Any]) -> None:
        calls: list[Any] = []
        with pytest.raises((InvalidValueError, InvalidTypeError)):
            quiet(task(calls=calls), **options)
        assert not calls

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

    def test_progress_names_every_run(self) -> None:
        said: list[tuple[int, int, str]] = []
        polyamp.parity(task(), controls=False, seeds=3, progress=lambda *one: said.append(one))
        assert [text.partition(":")[0] for _, _, text in said[:2]] == ["seed 0, float32", "seed 0, mixed_float16"]
        assert said[-1][:2] == (6, 6)

    def test_progress_tells_repeated_and_kept_runs(self, tmp_path: Path) -> None:
        said: list[str] = []
        options = {"keep": tmp_path / "runs.jsonl", "seeds": 3, "progress": lambda done, total, text: said.append(text)}
        for _ in range(2):
            polyamp.parity(task(), **options)  # type: ignore[arg-type]
        first, second = said[: len(said) // 2], said[len(said) // 2 :]
        assert first[1].startswith("seed 0, float32 again: ")
        assert second == [f"{text} (kept)" for text in first]

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
        with kept.open("a") as file:
            file.write('{"train": "cut')  # as a process that was killed leaves it
        calls.clear()
        limit.clear()
        found = quiet(train, keep=kept)
        assert len(calls) == 5
        assert found.as_dict() | {"name": ""} == quiet(whole).as_dict() | {"name": ""}
        calls.clear()
        assert str(quiet(train, keep=kept)) == str(found)
        assert not calls

    def test_runs_from_before_an_edit_of_the_file_are_reported(self, tmp_path: Path) -> None:
        script, kept = tmp_path / "mine.py", tmp_path / "runs.jsonl"

        def run_with(rate: float) -> float | None:
            script.write_text(f"def train(policy, seed):\n    return {rate} + seed\n")
            return quiet(runpy.run_path(str(script), run_name="mine")["train"], keep=kept, seeds=3).ways[0].mean

        assert run_with(1.0) == 2.0
        assert run_with(1.0) == 2.0
        with pytest.warns(PolyampWarning, match=r"runs\.jsonl has runs of mine:train from before its file was edited"):
            assert run_with(5.0) == 2.0

    def test_runs_of_a_function_without_a_file_are_taken(self, tmp_path: Path) -> None:
        kept = tmp_path / "runs.jsonl"
        for _ in range(2):
            namespace: dict[str, Any] = {"__name__": "mine"}
            exec("def train(policy, seed): return 1.0 + seed", namespace)
            quiet(namespace["train"], keep=kept, seeds=3)
        assert len(kept.read_text().splitlines()) == 6

    def test_partial_functions_do_not_take_each_others_runs(self, tmp_path: Path) -> None:
        kept = tmp_path / "runs.jsonl"
        slow, fast = (functools.partial(lambda rate, policy, seed: rate + seed, rate) for rate in (1.0, 5.0))
        means = [quiet(train, keep=kept, seeds=3).ways[0].mean for train in (slow, fast)]
        assert means == [2.0, 6.0]

    def test_policies_that_differ_in_rules_or_loss_scale_only_do_not_take_each_others_runs(
        self, tmp_path: Path
    ) -> None:
        calls: list[Any] = []
        others = [{}, {"loss_scale": 8}, {"rules": {"softmax": "lower"}}]
        policies = [polyamp.policy("mixed_float16", **more) for more in others]
        for _ in range(2):
            quiet(task(calls=calls), policies, keep=tmp_path / "runs.jsonl", seeds=3)
        assert Counter(Counter(name for name, _ in calls).values()) == {3: 4}

    def test_controls_and_the_repeated_run_are_kept_apart_and_are_what_they_were(self, tmp_path: Path) -> None:
        calls: list[Any] = []

        def train(policy: polyamp.Policy, seed: int) -> dict[str, float]:
            control = active()
            calls.append((policy.compute, control and control.name, seed))
            if control and control.update_format:
                imposed(policy.loss_scale)  # as an optimizer does that is wrapped; the other control is not in effect
            if control or (policy.compute == "bfloat16" and seed == 1):
                raise NonFiniteLossError("the loss is not finite", where="step 3", found="nan", fix="look")
            return {"loss": math.nan if policy.param == "float16" else 1.0 + seed, "steps": 3.0}

        policies = ["mixed_float16", "mixed_bfloat16", "O3"]
        first, second = (quiet(train, policies, keep=tmp_path / "runs.jsonl", controls=True) for _ in range(2))
        assert max(Counter(calls).values()) == calls.count(("float32", None, 0)) == 2
        assert len(calls) == sum(way.seeds for way in first.ways) + len(first.float32) + 1
        assert [way.verdict for way in first.comparisons] == ["equivalent", "worse", "worse"]
        assert second.as_dict() == first.as_dict()
        assert str(second) == str(first)

    @pytest.mark.parametrize(
        "run", [Run(3, 0.5, {"loss": 0.5, "steps": 7.0}, skipped=2), Run(4, 1.0, {}, failure="the loss is not finite")]
    )
    @pytest.mark.parametrize("was_reached", [True, False])
    def test_all_of_a_run_is_kept(self, tmp_path: Path, run: Run, was_reached: bool) -> None:
        key = ("m:train", "mixed_float16", "no loss scaling", run.seed)
        Journal(tmp_path / "runs.jsonl").add(key, run, was_reached)
        ((kept, (read, reached)),) = Journal(tmp_path / "runs.jsonl").runs.items()
        assert (kept, read._replace(value=run.value), reached) == (key, run, was_reached)

    @pytest.mark.parametrize("cut", range(4))
    def test_a_line_that_was_cut_off_anywhere_is_removed(self, tmp_path: Path, cut: int) -> None:
        path = tmp_path / "runs.jsonl"
        for seed in range(2):
            Journal(path).add(("m:train", "p", "", seed), Run(seed, 0.5, {"loss": 0.5}), True)
        whole, last = path.read_text().splitlines()
        path.write_text(f"{whole}\n{last[: (1, 5, 30, len(last))[cut]]}")
        assert [key[-1] for key in Journal(path).runs] == [0]
        assert path.read_text() == f"{whole}\n"

    @pytest.mark.parametrize("text", ["my notes\n", "my notes", '{"name": "x"}\n', '{"name": "x"}', "[1]\n", "7", "\n"])
    def test_a_file_of_something_else_is_refused_and_left_alone(self, tmp_path: Path, text: str) -> None:
        kept = tmp_path / "notes.txt"
        kept.write_text(text)
        with pytest.raises(InvalidValueError, match="is not a file of runs"):
            quiet(task(), keep=kept)
        assert kept.read_text() == text

    def test_a_folder_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidValueError, match="cannot be written"):
            quiet(task(), keep=tmp_path)

    def test_a_file_that_cannot_be_written_is_refused_before_anything_is_trained(self, tmp_path: Path) -> None:
        calls: list[Any] = []
        for path in (tmp_path, tmp_path / "none" / "runs.jsonl"):
            with pytest.raises(InvalidValueError, match="cannot be written"):
                quiet(task(calls=calls), keep=path)
        assert not calls


class TestControls:
    def test_what_controls_warn_of_is_not_for_the_user(self) -> None:
        def train(policy: polyamp.Policy, seed: int) -> float:
            if active() is not None:
                warn_once(f"broken on purpose, with seed {seed}")
            return 1.0 + seed

        quiet(train, controls=True, seeds=3)

    def test_a_step_that_is_kept_by_policy_is_not_reused_for_a_control(self) -> None:
        steps: dict[polyamp.Policy, Any] = {}

        def train(policy: polyamp.Policy, seed: int) -> float:
            steps.setdefault(policy, imposed(policy.loss_scale))
            return seed + 1.0

        quiet(train, controls=True, seeds=3)
        formats = {getattr(policy, "control", ""): update_format for policy, (_, update_format) in steps.items()}
        assert formats == {"": None, "no loss scaling": None, "16-bit updates": "float16"}

    def test_controls_are_not_trained_on_once_their_policy_has_failed(self) -> None:
        seeds: list[int] = []

        def train(policy: polyamp.Policy, seed: int) -> float:
            _, update_format = imposed(policy.loss_scale)
            if active() is not None:
                seeds.append(seed)
            damaged = policy.compute == "float16" and active() is None
            return 2.0 + seed + (5.0 + 0.01 * seed) * damaged + (seed % 3) * bool(update_format)

        found = quiet(train, controls=True)
        assert found.verdict == "worse"
        assert found.comparisons[0].seeds == 3
        assert max(seeds) == 2

    def test_policies_of_one_name_are_told_apart(self) -> None:
        policies = [polyamp.policy("mixed_float16", rules=rules) for rules in (None, {"softmax": "lower"})]
        first, second = (one.name for one in quiet(task(), policies).comparisons)
        assert first == "mixed_float16"
        assert "softmax" in second
