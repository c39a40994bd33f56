"""Every Python example in the documents runs, in order, in one namespace for each document."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


COMPARED = ("docs/troubleshooting.md", "docs/diagnosis.md")  # by test_troubleshooting.py, with what they print
RUN = [name for name in DOCUMENTS if name not in COMPARED and blocks((ROOT / name).read_text())]


@pytest.mark.parametrize("document", RUN)
def test_examples_run(document: str) -> None:
    namespace: dict[str, object] = {}
    for block in blocks((ROOT / document).read_text()):
        exec(compile(block, document, "exec"), namespace)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    here = (ROOT / document).parent
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / document).read_text()):
        assert (here / target).exists(), target
