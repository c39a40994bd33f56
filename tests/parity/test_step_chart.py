"""README's picture of training steps shows the numbers that were measured."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import step_chart  # noqa: E402


def texts(file: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", file.read_text())


@pytest.mark.parametrize("page", step_chart.INK)
def test_the_picture_is_the_one_that_the_results_give(page: str, tmp_path: Path) -> None:
    step_chart.main(tmp_path)
    name = f"steps_{page}.svg"
    assert texts(tmp_path / name) == texts(step_chart.IMAGES / name), "run python benchmarks/step_chart.py"
    assert f"docs/images/{name}" in (ROOT / "README.md").read_text()
