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
    ['frameworks', 'polyamp', 'python', 'system']
    """
    return {
        "polyamp": polyamp.__version__,
        "python": platform.python_version(),
        "system": f"{platform.platform()}, {os.cpu_count()} cores",
        "frameworks": {name: _examine(name) for name in registry.names()},
    }


def _examine(name: str) -> dict[str, Any]:
    try:
        return {"installed": True, **registry.adapter_named(name).describe()}
    except MissingFrameworkError as error:
        return {"installed": False, "why": str(error)}
