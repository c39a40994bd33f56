"""What `polyamp doctor` finds: each framework, its devices, the formats that are fast there, and a test of each."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import time
from collections.abc import Callable
from importlib import metadata
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import polyamp
from polyamp import adapters, selftest
from polyamp.errors import MissingFrameworkError, UnsupportedError

_SLOW = ("keras", "tensorflow")  # importing them can take ten seconds
_PATIENCE = 2.0  # seconds for which doctor waits for these
_WITHOUT_DEVICES = ("keras",)  # a test does not wait for it: it runs on another framework
_LIMIT = 120.0  # seconds without a word after which a framework that is tested hangs


def examine(asked: list[str] | None = None) -> dict[str, Any]:
    """Let adapters describe their frameworks, side by side in processes of their own: all, or those asked for."""
    names, problem = _named(asked)
    end = time.monotonic() + _PATIENCE
    answers = {name: _ask(name)[0] for name in names}
    for name in sorted(names, key=_SLOW.__contains__):
        can_wait = bool(asked) or name not in _SLOW
        answers[name].poll(None if can_wait else max(0.0, end - time.monotonic()))
    return _found(problem, {name: _answer(name, pipe) for name, pipe in answers.items()})


def examine_and_test(asked: list[str] | None, report: Callable[[str], None], *, again: bool) -> dict[str, Any]:
    """Examine frameworks one after the other, and test the devices of each."""
    names, problem = _named(asked)
    frameworks, tests = {}, {}
    for name in names:
        report(f"{name}: loading")
        pipe, process = _ask(name, test_again=again)
        pipe.poll(_LIMIT if asked or name not in _WITHOUT_DEVICES else _PATIENCE)
        frameworks[name] = _answer(name, pipe)
        if frameworks[name].get("devices"):
            tests[name] = _tested(name, pipe, process, report)
        process.kill()
    return {**_found(problem, frameworks), "selftest": tests}


def _named(asked: list[str] | None) -> tuple[list[str], str | None]:
    """Return the frameworks that are asked for, or all; and why there are none to ask."""
    try:
        return [adapters.entry_named(name).name for name in asked or ()] or adapters.names(), None
    except UnsupportedError as error:
        return asked or [], str(error)


def _found(problem: str | None, frameworks: dict[str, Any]) -> dict[str, Any]:
    return {
        "polyamp": polyamp.__version__,
        "python": platform.python_version(),
        "system": f"{platform.platform()}, {os.cpu_count()} cores",
        "problem": problem,
        "frameworks": frameworks,
    }


def _ask(name: str, *, test_again: bool | None = None) -> tuple[Connection, BaseProcess]:
    """Start a process that sends the description of a framework, and then a test; it ends with this one at the latest.

    ``test_again`` is whether a test that is kept is made again; with None nothing is tested.
    """
    context = multiprocessing.get_context("fork")  # starts at once, and knows what is loaded
    receives, sends = context.Pipe(duplex=False)
    process = context.Process(target=_examine, args=(name, sends, test_again), daemon=True)
    process.start()
    sends.close()
    return receives, process


def why_broken(name: str, error: Exception) -> str:
    """Describe why an adapter cannot be loaded: its framework is not installed, or it is and does not load."""
    if isinstance(error, MissingFrameworkError):
        return str(error)
    return f"{name} does not load: {type(error).__name__}: {error}. Try python -c 'import {name}'; install it again"


def _examine(name: str, sends: Connection, test_again: bool | None) -> None:
    os.nice(19 if name in _SLOW and test_again is None else 0)  # the others come first
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)  # for what frameworks log, C++ code included
    try:
        found = {"installed": True, **adapters.adapter_named(name).describe()}
    except Exception as error:
        found = {"installed": False, "why": why_broken(name, error)}
    sends.send(json.dumps(found))  # a version may be an object of the framework's
    if test_again is not None and found["installed"]:
        try:
            test = selftest.result_of(adapters.adapter_named(name), sends.send, again=test_again)
        except Exception as error:
            test = {"problem": f"{type(error).__name__}: {error}"}
        sends.send(test)


def _tested(name: str, pipe: Connection, process: BaseProcess, report: Callable[[str], None]) -> dict[str, Any]:
    """Return the test that a process sends after it reported each part; or how far it came."""
    doing = "its start"
    try:
        while pipe.poll(_LIMIT):
            answer = pipe.recv()
            if not isinstance(answer, str):
                return {"devices": {}, "notes": [], "kept": None, "problem": None, **answer}
            doing = answer
            report(f"{name}: {doing}")
        how = f"there was no answer for {_LIMIT:.0f} seconds"
    except EOFError:
        process.join()
        how = f"the process ended with exit code {process.exitcode}"
    return {"devices": {}, "notes": [], "kept": None, "problem": f"{how}, in {doing}"}


def is_wrong(found: dict[str, Any]) -> bool:
    """Return whether a test found a format wrong, or came to no end."""
    tests = found.get("selftest", {}).values()
    findings = [one for test in tests for device in test["devices"].values() for one in device]
    return any(test["problem"] for test in tests) or any(one["verdict"] == "wrong" for one in findings)


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


def rows_of_test(name: str, test: dict[str, Any]) -> list[list[str]]:
    """Return the rows of a framework's test, one for each device and operation, with a column for each format."""
    rows = []
    for device, findings in test["devices"].items():
        for operation in selftest.OPERATIONS:
            cells = [_cell(one) for one in findings if one["operation"] == operation]
            rows.append([f"{name} {device}", operation, *cells])
    return rows


def _cell(finding: dict[str, Any]) -> str:
    """Return a verdict, and how many times as fast as float32 it is for sizes that are aligned and that are not."""
    speeds = list(finding["speed"].values())
    if finding["format"] == "float32" or not speeds:
        return str(finding["verdict"])
    word = "fast " if speeds[0] >= selftest.FAST else "slow " if speeds[0] <= selftest.SLOW else ""
    return f"{finding['verdict']}, {word}{', '.join(f'{speed:g}' for speed in speeds)}"
