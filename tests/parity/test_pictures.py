"""Pictures of parities: their contents, and files of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from polyamp import comparison as comparisons
from polyamp.comparison import Comparison, Parity
from polyamp.errors import InvalidValueError
from support.seeded_runs import compared


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that draws into a file and returns the figure."""
    made: list[Figure] = []
    figure_of = comparisons.figure_for

    def kept(*arguments: Any) -> Figure:
        made.append(figure_of(*arguments))
        return made[-1]

    monkeypatch.setattr(comparisons, "figure_for", kept)

    def draw(report: Parity, name: str = "picture.png") -> Figure:
        report.plot(tmp_path / name)
        return made[-1]

    return draw


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
    assert [(text.get_text(), text.xy) for text in axis.texts] == [("outside", (1.0, 1)), ("outside", (-1.0, 2))]


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.PDF", b"%PDF"), ("a.svg", b"<?xml")])
def test_the_ending_chooses_the_format(tmp_path: Path, name: str, start: bytes) -> None:
    parity_of(comparison([0.1, 0.3, 0.2], margin=0.5)).plot(tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


@pytest.mark.parametrize("name", ["parity", "parity.nix"])
def test_a_picture_of_no_known_format_is_told(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidValueError, match="no image format"):
        parity_of(comparison([0.1, 0.3, 0.2], margin=0.5)).plot(tmp_path / name)
