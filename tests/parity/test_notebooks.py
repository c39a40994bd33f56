"""The notebooks of the documentation run, and their stored outputs are those of a run."""

import contextlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = Path(__file__).parents[2] / "docs" / "notebooks"
pytestmark = pytest.mark.slow


def words(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z]{3,}", text))


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.name)
def test_a_notebook_prints_what_is_stored_in_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(NOTEBOOKS)
    monkeypatch.setattr(sys, "path", [*sys.path])  # a notebook may add the examples
    cells: list[dict[str, Any]] = json.loads(path.read_text())["cells"]
    namespace: dict[str, object] = {"__name__": "__main__"}
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), path.name, "exec"), namespace)
        stored = "".join(line for output in cell["outputs"] for line in output["text"])
        assert words(stored) == words(printed.getvalue())
        assert stored.count("\n") == printed.getvalue().count("\n")
