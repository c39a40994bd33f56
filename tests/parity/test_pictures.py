"""Pictures of probes and parities: their contents, and files of every kind."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from polyamp.diagnosis import comparison as comparisons
from polyamp.diagnosis import pictures
from polyamp.diagnosis.comparison import Comparison, Parity
from polyamp.diagnosis.probe import Probe
from polyamp.diagnosis.recording import ACTIVATION, GRADIENT, PARAMETER, Kind, Observation, Recording
from polyamp.errors import InvalidValueError
from support.diagnosis_cases import count_values
from support.seeded_runs import compared

RNG = np.random.default_rng(0)


def tensor(kind: Kind, name: str, power: float, fmt: str = "float16") -> Observation:
    values = 2.0**power * np.exp(RNG.normal(0, 2, 500))
    return Observation(kind, name, "block" if kind != PARAMETER else "", "lower", fmt, (500,), count_values(values))


OBSERVATIONS = (
    tensor(ACTIVATION, "matmul", 0),
    tensor(ACTIVATION, "softmax", -6, "float32"),
    tensor(GRADIENT, "softmax", -20, "float32"),
    tensor(GRADIENT, "matmul", -20),
    tensor(PARAMETER, "weight", -16),
)
PROBE = Probe(Recording("torch", "mixed_float16", 1.0, 1.0, OBSERVATIONS), "float16")
NOTHING = Probe(Recording("jax", "mixed_float16", None, 1.0, ()), "float16")
MANY = Probe(Recording("jax", "mixed_bfloat16", 1.0, 1.0, OBSERVATIONS * 60), "bfloat16")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that draws into a file and returns the figure."""
    made: list[Figure] = []
    figure_of = pictures.figure_for

    def kept(*arguments: Any) -> Figure:
        made.append(figure_of(*arguments))
        return made[-1]

    for module in (pictures, comparisons):
        monkeypatch.setattr(module, "figure_for", kept)

    def draw(report: Probe | Parity, name: str = "picture.png") -> Figure:
        report.plot(tmp_path / name)
        return made[-1]

    return draw


def test_a_probe_has_a_row_for_each_tensor_and_the_limits(drawn: Any) -> None:
    axis = drawn(PROBE).axes[0]
    names = axis.get_yticklabels()
    assert [(name.get_text(), name.get_color()) for name in names][1:3] == [("block/softmax", "grey")] * 2
    assert names[-1].get_text() == "weight"
    heat, *limits = axis.collections
    assert np.nansum(heat.get_array().filled(0), axis=1) == pytest.approx([1.0] * 5)
    lines = [line.get_segments()[0] for line in limits]
    scale = math.log2(PROBE.recommended.init)
    assert [line[0][0] for line in lines] == pytest.approx(
        [-24.0, -14.0, math.log2(65504), -24.0 - scale, -14.0 - scale, math.log2(65504) - scale]
    )
    assert [(line[0][1], line[1][1]) for line in lines] == [(0, 2)] * 3 + [(2, 5)] * 3


@pytest.mark.parametrize("report", [NOTHING, MANY], ids=["nothing", "many"])
def test_the_odd_ones_are_drawn_too(drawn: Any, tmp_path: Path, report: Probe) -> None:
    drawn(report)
    assert imread(tmp_path / "picture.png").std() > 0.01


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.PDF", b"%PDF"), ("a.svg", b"<?xml")])
def test_the_ending_chooses_the_format(drawn: Any, tmp_path: Path, name: str, start: bytes) -> None:
    drawn(PROBE, name)
    assert (tmp_path / name).read_bytes().startswith(start)


@pytest.mark.parametrize("name", ["probe", "probe.nix"])
def test_a_picture_of_no_known_format_is_told(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidValueError, match="no image format"):
        PROBE.plot(tmp_path / name)


def parity_of(*ways: Comparison) -> Parity:
    return Parity("module:train", ways[0].question, (), ways)


def comparison(values: Sequence[float], reference: Sequence[float] | None = None, **more: Any) -> Comparison:
    return compared(values, reference, seeds=len(values), **more)


def test_a_parity_has_the_interval_of_each_way_and_room_for_those_of_policies(drawn: Any) -> None:
    ways = (
        comparison([0.1, 0.3, 0.2], margin=0.5),
        comparison([4.1, 4.0, 4.2], control="worse", margin=0.5),
        comparison([-4.0, -4.2, -4.1], control="better", margin=0.5),
    )
    (axis,) = drawn(parity_of(*ways)).axes
    assert axis.get_title() == "module:train"
    assert axis.get_xlabel() == "loss: difference from float32"
    assert [label.get_text().partition("\n")[0] for label in axis.get_yticklabels()] == [
        "mixed_float16",
        "control: worse",
        "control: better",
    ]
    assert axis.get_ylim() == (2.5, -0.5)  # the first one is on top
    intervals = [bars.lines[2][0].get_segments()[0] for bars in axis.containers]
    assert [(one[0][1], *one[:, 0]) for one in intervals] == [
        pytest.approx((place, way.difference.low, way.difference.high)) for place, way in enumerate(ways)
    ]
    assert [bars.lines[0].get_xdata()[0] for bars in axis.containers] == pytest.approx([0.2, 4.1, -4.1])
    assert axis.get_xlim() == (-1.0, 1.0)  # twice the margin; the controls are outside
