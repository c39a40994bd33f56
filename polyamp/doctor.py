"""What `polyamp doctor` finds: each framework, its devices, and the formats that are fast there."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import time
from importlib import metadata
from multiprocessing.connection import Connection
from typing import Any

import polyamp
from polyamp import adapters
from polyamp.errors import MissingFrameworkError, UnsupportedError

_SLOW = ("keras", "tensorflow")  # importing them can take ten seconds
_PATIENCE = 2.0  # seconds for which doctor waits for these


def examine(asked: list[str] | None = None) -> dict[str, Any]:
    """Let adapters describe their frameworks, side by side in processes of their own: all, or those asked for."""
    names, problem = asked or [], None
    try:
        names = [adapters.entry_named(name).name for name in names] or adapters.names()
    except UnsupportedError as error:
        problem = str(error)
    end = time.monotonic() + _PATIENCE
    answers = {name: _ask(name) for name in names}
    for name in sorted(names, key=_SLOW.__contains__):
        can_wait = bool(asked) or name not in _SLOW
        answers[name].poll(None if can_wait else max(0.0, end - time.monotonic()))
    return {
        "polyamp": polyamp.__version__,
        "python": platform.python_version(),
        "system": f"{platform.platform()}, {os.cpu_count()} cores",
        "problem": problem,
        "frameworks": {name: _answer(name, pipe) for name, pipe in answers.items()},
    }


def _ask(name: str) -> Connection:
    """Start a process that sends the description of a framework; it ends with this one at the latest."""
    context = multiprocessing.get_context("fork")  # starts at once, and knows what is loaded
    receives, sends = context.Pipe(duplex=False)
    context.Process(target=_examine, args=(name, sends), daemon=True).start()
    sends.close()
    return receives


def why_broken(name: str, error: Exception) -> str:
    """Describe why an adapter cannot be loaded: its framework is not installed, or it is and does not load."""
    if isinstance(error, MissingFrameworkError):
        return str(error)
    return f"{name} does not load: {type(error).__name__}: {error}. Try python -c 'import {name}'; install it again"


def _examine(name: str, sends: Connection) -> None:
    os.nice(19 if name in _SLOW else 0)  # the others come first
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)  # for what frameworks log, C++ code included
    try:
        found = {"installed": True, **adapters.adapter_named(name).describe()}
    except Exception as error:
        found = {"installed": False, "why": why_broken(name, error)}
    sends.send(json.dumps(found))  # a version may be an object of the framework's


def _answer(name: str, receives: Connection) -> dict[str, Any]:
    try:
        if receives.poll():
            answer: dict[str, Any] = json.loads(receives.recv())
            return answer
    except EOFError:
        return {"installed": False, "why": why_broken(name, SystemError("the process ended"))}
    found = [one for package in (name, f"{name}-cpu") for one in metadata.distributions(name=package)]
    notes = [f"not asked for devices, since it takes long to load: polyamp doctor {name} waits for it"]
    return {"installed": True, "version": found[0].version if found else "", "devices": [], "notes": notes}


def rows_of(name: str, framework: dict[str, Any]) -> list[list[str]]:
    """Return the rows of a framework in the table, one for each device."""
    if not framework["installed"]:
        state = "not installed" if "is not installed" in framework["why"] else "broken"
        return [[name, state, "", "", framework["why"]]]
    rows = [["", "", one["name"], ", ".join(one["fast"]) or "none", ""] for one in framework["devices"]]
    rows = rows or [[""] * 5]
    rows[0][:2] = [name, framework["version"]]
    rows[0][4] = "\n".join(framework["notes"])
    return rows
