"""``polyamp doctor``: what is installed, what runs fast, and what to do if something is missing."""

from __future__ import annotations

import os
import platform
from typing import Any

import polyamp
from polyamp import registry
from polyamp.errors import MissingFrameworkError


def examine() -> dict[str, Any]:
    """Load every adapter and ask it to describe itself; for a missing framework, report how to install it."""
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
