"""Sweeps over static loss scales: outcomes, the window of ok scales, progress, pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import polyamp
from polyamp import LossScaleError
from polyamp.diagnosis.probe import Probe
from polyamp.diagnosis.recording import GRADIENT, Observation, Recording
from polyamp.diagnosis.spread import Spread
from polyamp.diagnosis.sweep import SCALES, Sweep, sweep
from polyamp.diagnosis.window import Window
from polyamp.errors import InvalidTypeError, InvalidValueError, MissingFrameworkError, PolyampError

POWERS = [2.0**exponent for exponent in range(-4, 31, 2)]
FLOAT32 = 5.3757

GRADIENTS = (Observation(GRADIENT, "matmul", "dot", "head", "lower", "float16", (2,), Spread.of([2.0**-30, 2.0**-12])),)
PROBE = Probe(Recording("jax", "mixed_float16", FLOAT32, 1.0, True, GRADIENTS), "float16", tolerance=0.0)


def train(scale: float) -> tuple[float, int]:
    """As a word LSTM did: stalls below 2**7, skips a quarter of its steps at 2**25, and all of them above."""
    if scale >= 2.0**26:
        return 7.60, 100
    if scale >= 2.0**25:
        return 5.437, 25
    return (FLOAT32, 0) if scale >= 2.0**7 else (FLOAT32 + 0.1, 0)


def swept(train: Callable[[float], Any] = train, scales: Any = POWERS, **options: Any) -> Sweep:
    return sweep(train, scales, **{"reference": FLOAT32, "progress": False, **options})


def outcomes(found: Sweep) -> dict[str, Any]:
    rows = zip(found.trials, found.outcomes, strict=True)
    return {math.log2(trial.scale): outcome for trial, outcome in rows}


def test_every_scale_has_its_outcome() -> None:
    found = outcomes(swept())
    assert {e for e, outcome in found.items() if outcome == "too small"} == {-4, -2, 0, 2, 4, 6}
    assert {e for e, outcome in found.items() if outcome == "ok"} == set(range(8, 25, 2))
    assert {e for e, outcome in found.items() if outcome == "too large"} == {26, 28, 30}


def test_the_window_is_of_the_ok_scales() -> None:
    assert swept().window == Window(2.0**8, 2.0**24)


@pytest.mark.parametrize("said", [lambda loss: loss, lambda loss: (loss, 0)], ids=["loss alone", "no skips"])
def test_without_skips_a_loss_that_is_off_is_judged_by_its_side_of_the_ok_ones(said: Any) -> None:
    assert outcomes(swept(lambda scale: said(train(scale)[0]))) == outcomes(swept())


def test_where_nothing_is_ok_the_best_divides_small_from_large() -> None:
    found = swept(lambda scale: FLOAT32 + 1 + abs(math.log2(scale) - 8), [2.0**4, 2.0**8, 2.0**12])
    assert found.outcomes == ("too small", "too small", "too large")
    assert found.window is None
    assert "no scale is ok" in str(found)


@pytest.mark.parametrize("loss", [math.inf, -math.inf, math.nan])
def test_a_loss_that_is_not_finite_is_of_too_large_a_scale(loss: float) -> None:
    assert swept(lambda scale: loss, [1.0]).outcomes == ("too large",)


def test_skipped_steps_that_cost_nothing_are_ok() -> None:
    assert swept(lambda scale: (FLOAT32, 2), [1.0]).outcomes == ("ok",)


@pytest.mark.parametrize("counts", [(3, 3), (7, 7)])
def test_a_scale_at_which_every_step_was_skipped_is_not_ok(counts: tuple[int, int]) -> None:
    assert swept(lambda scale: (FLOAT32, *counts), [1.0]).outcomes == ("too large",)
    assert swept(lambda scale: (FLOAT32, counts[0] - 1, counts[1]), [1.0]).outcomes == ("ok",)


def test_scales_that_skip_as_much_and_reach_the_same_loss_trained_nothing() -> None:
    found = swept(lambda scale: (FLOAT32 + 0.001, 3) if scale > 4 else (FLOAT32, 1), [1.0, 2.0, 4.0, 8.0, 16.0])
    assert found.outcomes == ("ok", "ok", "ok", "too large", "too large")


def test_a_bad_batch_that_every_scale_skips_takes_no_scale_away() -> None:
    assert swept(lambda scale: (FLOAT32, 1), [1.0, 2.0, 4.0]).outcomes == ("ok", "ok", "ok")


def test_a_better_loss_is_no_parity() -> None:
    assert swept(lambda scale: FLOAT32 - 0.05, [1.0]).outcomes == ("too small",)


@given(st.lists(st.booleans(), min_size=1, max_size=20))
def test_the_window_is_the_longest_run_of_ok_scales(fine: list[bool]) -> None:
    found = swept(lambda scale: FLOAT32 + (not fine[int(math.log2(scale))]), [2.0**e for e in range(len(fine))])
    runs = "".join("x" if ok else " " for ok in fine).split()
    longest = max(map(len, runs), default=0)
    if found.window is None:
        assert longest == 0
    else:
        low, high = (int(math.log2(limit)) for limit in found.window)
        assert all(fine[low : high + 1])
        assert high - low + 1 == longest


def test_a_polyamp_error_ends_that_run_alone() -> None:
    def raising(scale: float) -> float:
        if scale > 4:
            raise LossScaleError("too many skipped steps in a row")
        return FLOAT32

    found = swept(raising, [2.0, 4.0, 8.0])
    assert found.outcomes == ("ok", "ok", "failed")
    assert "too many skipped steps" in str(found)
    assert "too many skipped steps" in found.as_dict()["trials"][2]["failure"]


def test_other_errors_go_through() -> None:
    with pytest.raises(ZeroDivisionError):
        swept(lambda scale: 1 / 0)


@pytest.mark.parametrize("given_", [np.float32(FLOAT32), np.array(FLOAT32), (np.array(FLOAT32), np.int32(0)), 5])
def test_losses_may_be_scalars_of_arrays(given_: Any) -> None:
    assert isinstance(swept(lambda scale: given_, [1.0], tolerance=1.0).trials[0].loss, float)


@pytest.mark.parametrize("given_", [None, "5.3", [1.0, 2.0, 3.0], True, np.ones(3), {"loss": 1.0}])
def test_what_is_no_loss_is_told(given_: Any) -> None:
    with pytest.raises(InvalidTypeError, match="not a loss"):
        swept(lambda scale: given_, [1.0])


@pytest.mark.parametrize("scales", [[], [0.0], [-1.0], [math.inf], [math.nan, 1.0], [True]])
def test_scales_are_positive_and_finite(scales: list[float]) -> None:
    with pytest.raises(InvalidValueError, match="positive, finite"):
        swept(scales=scales)


@pytest.mark.parametrize("options", [{"train": 3}, {"probe": 3}, {"tolerance": -1.0}, {"tolerance": "a"}])
def test_arguments_of_another_type_are_told(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidTypeError, match=f"invalid {next(iter(options))}"):
        swept(**options)


def test_a_reference_that_is_not_finite_is_told() -> None:
    with pytest.raises(InvalidValueError, match="reference loss is not finite"):
        swept(reference=lambda: math.nan)


def test_scales_are_tried_once_each_in_ascending_order() -> None:
    tried: list[float] = []
    swept(lambda scale: tried.append(scale) or FLOAT32, [4.0, 1.0, 4.0, 2.0])  # type: ignore[func-returns-value]
    assert tried == [1.0, 2.0, 4.0]


def test_the_scales_of_its_own() -> None:
    assert tuple(trial.scale for trial in sweep(train, progress=False).trials) == SCALES


def test_without_a_reference_it_is_the_best_finite_loss() -> None:
    found = sweep(lambda scale: math.nan if scale > 4 else 1 / scale, [1.0, 4.0, 8.0], progress=False)
    assert found.reference == 0.25
    assert "best of these runs" in str(found)


def test_nothing_finite_at_all() -> None:
    found = sweep(lambda scale: math.nan, [1.0], progress=False)
    assert found.reference is None
    assert "no run reached a finite loss" in str(found)


def test_the_probed_window_is_compared() -> None:
    found = swept(probe=PROBE)
    assert found.probed == PROBE.window == Window(2.0**5, 2.0**24)
    assert [trial.scale for trial in found.unsafe] == [2.0**6]
    assert "of 10 scales in it, not ok: 2^6" in str(found)


def test_it_prints_as_a_table() -> None:
    assert str(swept(scales=[2.0**-4, 2.0**8, 2.0**26], probe=PROBE)).splitlines() == [
        "reference loss 5.3757; ok is within 0.01 of it",
        "",
        "scale    loss   off by  skipped  outcome    probe",
        " 2^-4  5.4757  +0.1000        0  too small",
        "  2^8  5.3757  +0.0000        0  ok         safe",
        " 2^26  7.6000  +2.2243      100  too large",
        "",
        "ok: 2^8 .. 2^8",
        "the probe's window: 2^5 .. 2^24; of 1 scales in it, not ok: none",
    ]


def test_it_saves_json(tmp_path: Path) -> None:
    found = swept(lambda scale: math.nan if scale > 2 else FLOAT32, [1.0, 4.0], probe=PROBE)
    found.save(tmp_path / "sweep.json")
    saved = json.loads((tmp_path / "sweep.json").read_text())
    assert saved == found.as_dict()
    assert [trial["loss"] for trial in saved["trials"]] == [FLOAT32, "nan"]
    assert saved["window"] == {"low": 1.0, "high": 1.0}


def test_progress_may_be_a_function() -> None:
    said: list[tuple[int, int, str]] = []
    swept(scales=[1.0, 2.0**10], reference=lambda: FLOAT32, progress=lambda *news: said.append(news))
    assert said == [
        (1, 3, "reference: loss 5.3757"),
        (2, 3, "scale 2^0: loss 5.4757"),
        (3, 3, "scale 2^10: loss 5.3757"),
    ]


def test_progress_is_lines_where_standard_error_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    swept(scales=[2.0**10], progress=True)
    assert capsys.readouterr() == ("", "1/1 scale 2^10: loss 5.3757\n")


def test_no_progress_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    swept()
    assert capsys.readouterr() == ("", "")


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(MissingFrameworkError, match=r"polyamp\[plot\]"):
        swept().plot(tmp_path / "sweep.png")


def test_it_is_public() -> None:
    assert polyamp.sweep is sweep
    assert issubclass(LossScaleError, PolyampError)
