"""Sources and documents have no expression to avoid, and each of these is found where it is planted."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "explain" / "glossary.md"  # it lists the words to avoid
SOURCES = sorted(file for folder in ("polyamp", "backends", "examples") for file in (ROOT / folder).rglob("*.py"))
DOCUMENTS = sorted({*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"} - {GLOSSARY})
AVOIDED = {  # and what to write instead
    r"(?<!there )\b(?:is|are|was|were) no (?!longer\b|more\b|less\b|larger\b|smaller\b)": "is not a",
    r"\bby chance\b": "stochastically, at random",
    r"\b(?:take|takes|took|taken|taking) down\b": "record",
    r"\b(?:bears|bore)\b": "tolerates",
    r"\b(?:give|gives|gave|given|giving) back\b": "return",
    r"\bwhat it is given\b": "its arguments",
    r"\bone of ours\b": "polyamp's own",
}
SAYING = {r"\b(?:say|says|said|saying)\b": "report, state, name"}  # documents may speak, code does not
FRAGMENT = re.compile(
    r"(?:Of|What|Who|Where|Which|How|Whether|The|A|An)\b"
)  # a docstring's first word, but for a noun's

pytestmark = pytest.mark.once


def found_in(source: str, is_code: bool) -> list[str]:
    """Return each expression to avoid in the sentences of a source or a document, which quote code in backticks."""
    avoided = AVOIDED | SAYING if is_code else AVOIDED
    texts = [*sentences(source)] if is_code else [re.sub(r"^```.*?^```", "", source, flags=re.M | re.S)]
    prose = re.sub(r"``[^`]*``|`[^`]*`|^ *(?:>>>|\.\.\.).*$", "", "\n".join(texts), flags=re.M)
    return [match[0] for pattern in avoided for match in re.finditer(pattern, prose, re.IGNORECASE)]


def sentences(source: str) -> Iterator[str]:
    """Yield comments, docstrings and other strings."""
    yield from re.findall(r"(?:^|\s)#\s.*$", source, re.MULTILINE)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def fragments_in(source: str) -> list[str]:
    """Return the docstrings of functions, but for properties, that do not start with a verb."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    plain = [one for one in functions if not any("property" in ast.unparse(each) for each in one.decorator_list)]
    texts = [ast.get_docstring(one) or "" for one in plain]
    return [text for text in texts if FRAGMENT.match(text)]


@pytest.mark.parametrize("file", [*SOURCES, *DOCUMENTS], ids=lambda file: str(file.relative_to(ROOT)))
def test_no_sentence_has_an_expression_to_avoid(file: Path) -> None:
    text, is_code = file.read_text(), file.suffix == ".py"
    assert found_in(text, is_code) == []
    assert not is_code or fragments_in(text) == []


@pytest.mark.parametrize("sentence", ["it is no tensor", "by chance", "it takes down", "bears", "give back", "he says"])
def test_a_planted_expression_is_found(sentence: str) -> None:
    for code in ('"""{}."""', "# {}", "raise ValueError('{}')", "text = f'{{1}} {}'"):
        assert len(found_in(code.format(sentence), is_code=True)) == 1
    assert len(found_in(f"Text.\n```python\n{sentence}\n```\nMore: {sentence}.", is_code=False)) == (
        "says" not in sentence
    )
    assert found_in(f'"""there is no adapter, and ``{sentence}`` it is no longer there"""', is_code=True) == []
    assert fragments_in('def merged():\n    """Of both."""\n')
