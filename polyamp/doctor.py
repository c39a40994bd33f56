"""``polyamp doctor``: what is installed, what it can do fast, and what to do where something is missing."""

from __future__ import annotations

import os
import platform
from typing import Any

import polyamp
from polyamp import registry
from polyamp.errors import MissingFrameworkError


def examine() -> dict[str, Any]:
    """Load every adapter and ask it; a framework that is not installed is told with the way to get it.

    >>> sorted(examine())
    ['frameworks', 'polyamp', 'problem', 'python', 'system']
    >>> examine()["problem"]  # or why no adapter is found at all, and what to do

    """
    names = registry.names()
    return {
        "polyamp": polyamp.__version__,
        "python": platform.python_version(),
        "system": f"{platform.platform()}, {os.cpu_count()} cores",
        "problem": None if names else f"{registry.UNREGISTERED}. To do: {registry.INSTALL}",
        "frameworks": {name: _examine(name) for name in names},
    }


def _examine(name: str) -> dict[str, Any]:
    try:
        return {"installed": True, **registry.adapter_named(name).describe()}
    except MissingFrameworkError as error:
        return {"installed": False, "why": str(error)}
