"""The expressions that polyamp's sentences avoid, and where they are in its sources and documents.

Docstrings, comments, texts in code and documents are searched. Code is not, also in documents.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

AVOIDED = {
    r"(?<!there )\b(?:is|are|was|were) no (?!longer\b|more\b|less\b|larger\b|smaller\b)": "is not a",
    r"\bby chance\b": "stochastically, at random",
    r"\b(?:take|takes|took|taken|taking) down\b": "record",
    r"\b(?:bears|bore)\b": "tolerates",
    r"\b(?:give|gives|gave|given|giving) back\b": "return",
    r"\bwhat it is given\b": "its arguments",
    r"\bone of ours\b": "polyamp's own",
}
"""For each expression, what to write instead."""

SAYING = {r"\b(?:say|says|said|saying)\b": "report, state, name"}
"""Code does not speak: it reports. Documents may speak."""

FRAGMENT = re.compile(r"(?:Of|What|Who|Where|Which|How)\b")
"""The first word of a docstring that only the name completes."""

NOUN = re.compile(r"(?:Whether|The|A|An)\b")
"""The first word of a noun phrase, which only a property may have."""


class Finding(NamedTuple):
    """One expression to avoid."""

    file: Path
    line: int
    found: str
    instead: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: for {self.found!r} write: {self.instead}"


def findings_in(file: Path) -> list[Finding]:
    """Return what to change in a Python file or a Markdown document."""
    source = file.read_text()
    if file.suffix != ".py":
        return list(_matches(file, _prose(source), AVOIDED))
    nodes = list(ast.walk(ast.parse(source)))
    avoided = AVOIDED | SAYING
    texts = _strings(nodes)
    if any(re.search(pattern, source, re.IGNORECASE) for pattern in avoided):  # to tokenize a file is slow
        texts = chain(texts, _comments(source))
    return [*_matches(file, texts, avoided), *_fragments(file, nodes)]


def _matches(file: Path, texts: Iterator[tuple[int, str]], avoided: dict[str, str]) -> Iterator[Finding]:
    for line, text in texts:
        for pattern, instead in avoided.items():
            for match in re.finditer(pattern, text, re.IGNORECASE):
                yield Finding(file, line + text.count("\n", 0, match.start()), match[0], instead)


def _strings(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, _without_code(node.value)


def _comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield a document without its blocks of code."""
    yield 1, _without_code(re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), source, flags=re.M | re.S))


def _without_code(text: str) -> str:
    """Remove quoted code, and the lines of an example."""
    text = re.sub(r"``[^`]*``|`[^`]*`", lambda code: "\n" * code[0].count("\n"), text)
    return re.sub(r"^[ ]*(?:>>>|\.\.\.).*$", "", text, flags=re.M)


def _fragments(file: Path, nodes: list[ast.AST]) -> Iterator[Finding]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            match = FRAGMENT.match(text) or (None if _is_property(node) else NOUN.match(text))
            if match:
                yield Finding(file, node.lineno, match[0], "a sentence that starts with a verb")


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("property" in ast.unparse(one) for one in node.decorator_list)
