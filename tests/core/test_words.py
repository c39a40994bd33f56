"""Sources and documents have no expression to avoid, and each of these is found where it is planted."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.words import AVOIDED, SAYING, findings_in

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "explain" / "glossary.md"  # it lists the words to avoid
SOURCES = sorted(file for folder in ("polyamp", "backends", "examples") for file in (ROOT / folder).rglob("*.py"))
DOCUMENTS = sorted({*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"} - {GLOSSARY})
PLANTED = {
    "is not a": "it is no tensor",
    "stochastically, at random": "it rounds by chance",
    "record": "it takes down a step",
    "tolerates": "a layer bears this scale",
    "return": "it gives back a tensor",
    "its arguments": "a function of what it is given",
    "polyamp's own": "a format that is one of ours",
    "report, state, name": "the policy says so",
}
"""For each advice, a sentence that needs it."""

pytestmark = pytest.mark.once


def found_in(tmp_path: Path, name: str, text: str) -> list[str]:
    file = tmp_path / name
    file.write_text(text)
    return [finding.instead for finding in findings_in(file)]


@pytest.mark.parametrize("files", [SOURCES, DOCUMENTS], ids=["sources", "documents"])
def test_no_sentence_has_an_expression_to_avoid(files: list[Path]) -> None:
    assert len(files) > 20
    assert not [str(finding) for file in files for finding in findings_in(file)]


def test_every_expression_is_planted() -> None:
    assert set(PLANTED) == {*AVOIDED.values(), *SAYING.values()}


@pytest.mark.parametrize(("advice", "sentence"), PLANTED.items(), ids=PLANTED)
def test_a_planted_expression_is_found(tmp_path: Path, advice: str, sentence: str) -> None:
    for code in ('"""{}."""', "# {}", "raise ValueError('{}')", "text = f'{{1}} {}'"):
        assert found_in(tmp_path, "planted.py", code.format(sentence) + "\n") == [advice]
    document = f"Text.\n```python\n{sentence}\n```\nMore: {sentence}.\n"
    assert found_in(tmp_path, "planted.md", document) == ([] if advice in SAYING.values() else [advice])


@pytest.mark.parametrize(
    ("decorator", "word", "is_right"),
    [("", "Of", False), ("@property\n", "What", False), ("@property\n", "Whether", True), ("", "The", False)],
)
def test_a_planted_fragment_is_found(tmp_path: Path, decorator: str, word: str, is_right: bool) -> None:
    code = f'{decorator}def merged():\n    """{word} both."""\n'
    assert found_in(tmp_path, "planted.py", code) == ([] if is_right else ["a sentence that starts with a verb"])


def test_plain_sentences_and_code_pass(tmp_path: Path) -> None:
    text = "there is no adapter, and it is no longer there\ncall ``said`` or `said`\n>>> said = 'it is no tensor'"
    assert not found_in(tmp_path, "plain.py", f'"""\n{text}\n"""\n')
