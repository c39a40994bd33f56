"""The words that polyamp's sentences avoid, and where they occur in its sources and documents.

Docstrings, comments, texts in code and documents are looked through. Code, also in documents, is not.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

AVOIDED = {
    r"(?<!there )\b(?:is|are|was|were) no (?!longer\b|more\b|less\b|larger\b|smaller\b)": "is not a",
    r"\bby chance\b": "stochastically; at random",
    r"\b(?:take|takes|took|taken|taking) down\b": "record",
    r"\b(?:bears|bore)\b": "tolerates",
    r"\b(?:give|gives|gave|given|giving) back\b": "return",
    r"\b(?:say|says|said|saying)\b": "report, state; the text",
    r"\bwhat it is given\b": "its arguments",
    r"\bone of ours\b": "polyamp's own",
}
"""A pattern for each expression, and what to write instead."""

FRAGMENTS = re.compile(r"(?:Of|What|Who|Where|Which|How)\b")
"""The first word of a docstring that only the function's name completes."""


class Finding(NamedTuple):
    """One expression to avoid: the file and line, the expression, and what to write instead."""

    file: Path
    line: int
    found: str
    instead: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.found!r}: write {self.instead}"


def findings_in(file: Path) -> list[Finding]:
    """Return what to change in a Python file or a Markdown document."""
    source = file.read_text()
    sentences = _of_python(source) if file.suffix == ".py" else _of_markdown(source)
    found = [
        Finding(file, line + text.count("\n", 0, match.start()), match[0], instead)
        for line, text in sentences
        for pattern, instead in AVOIDED.items()
        for match in re.finditer(pattern, text, re.IGNORECASE)
    ]
    return [*found, *(_fragments(file, source) if file.suffix == ".py" else ())]


def _of_python(source: str) -> Iterator[tuple[int, str]]:
    tree = ast.parse(source)
    parts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    yield from ((node.lineno, _without_code(node.value)) for node in parts)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _of_markdown(source: str) -> Iterator[tuple[int, str]]:
    yield 1, _without_code(re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), source, flags=re.M | re.S))


def _without_code(text: str) -> str:
    """Return a text without what is code in it: literals, and the lines of an example."""
    text = re.sub(r"``[^`]*``|`[^`]*`", lambda code: re.sub(r"[^\n]", "", code[0]), text)
    return re.sub(r"^[ ]*(?:>>>|\.\.\.).*$", "", text, flags=re.M)


def _fragments(file: Path, source: str) -> Iterator[Finding]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            match = FRAGMENTS.match(ast.get_docstring(node) or "")
            if match:
                yield Finding(file, node.lineno, match[0], "a sentence that starts with a verb")
