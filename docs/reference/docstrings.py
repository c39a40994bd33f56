"""Extension of the site's API pages: show the examples in docstrings as code."""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^( *)>>> .*\n(?:\1.*\S.*\n?)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Puts the doctests of every docstring into fences. Griffe does so only below a heading ``Examples:``."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(docstring: str) -> str:
    """Return the docstring with each doctest, up to the next empty line, in a fence."""
    return DOCTEST.sub(
        lambda found: (
            f"{found[1]}```pycon\n{found[0].rstrip()}\n{found[1]}```\n"
        ),
        docstring,
    )
