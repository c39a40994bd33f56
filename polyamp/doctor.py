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
_WITHOUT_DEVICES = ("keras",)  # it runs on another framework
_PATIENCE = 2.0  # seconds for which doctor waits for these, unless it is asked for them
_LIMIT = 120.0  # seconds without a word after which a framework hangs


def examine(
    asked: list[str] | None = None, report: Callable[[str], object] | None = None, *, again: bool = False
) -> dict[str, Any]:
    """Return what all adapters, or those in ``asked``, tell of their frameworks, each in a process of its own.

    With ``report``, each then tests its devices, one after the other since speed is measured; ``report`` is called
    with what comes next. ``again`` tests although a result is kept.
    """
    try:
        names, problem = [adapters.entry_named(name).name for name in asked or ()] or adapters.names(), None
    except UnsupportedError as error:
        names, problem = asked or [], str(error)
    slow = () if asked else _WITHOUT_DEVICES if report else _SLOW
    end, started = time.monotonic(), {name: _start(name, is_slow=name in slow) for name in names}
    for name in sorted(names, key=slow.__contains__):
        limit = _PATIENCE if name in slow else _LIMIT
        started[name][1].poll(max(0.0, end + limit - time.monotonic()))
    found: dict[str, Any] = {
        "polyamp": polyamp.__version__,
        "python": platform.python_version(),
        "system": f"{platform.platform()}, {os.cpu_count()} cores",
        "problem": problem,
        "frameworks": {name: _description(name, pipe) for name, (_, pipe) in started.items()},
    }
    for name, framework in found["frameworks"].items():
        if not (report and framework.get("devices")):
            started.pop(name)[0].kill()
    if report:  # JAX first: it takes most of a GPU's memory when it loads, and returns it when its process ends
        found["selftest"] = {name: _tested(name, *started[name], again, report) for name in sorted(started)}
    return found


def _start(name: str, *, is_slow: bool) -> tuple[BaseProcess, Connection]:
    """Start a process that sends the description of a framework, and its test when told to."""
    context = multiprocessing.get_context("fork")  # starts at once, and knows what is loaded
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(name, there, here, is_slow), daemon=True)
    process.start()
    there.close()
    return process, here


def why_broken(name: str, error: Exception) -> str:
    """Return why an adapter cannot be loaded: its framework is not installed, or is installed but does not load."""
    if isinstance(error, MissingFrameworkError):
        return str(error)
    return f"{name} does not load: {type(error).__name__}: {error}. Try python -c 'import {name}'; install it again"


def _serve(name: str, pipe: Connection, others: Connection, is_slow: bool) -> None:
    others.close()  # then this process ends too if the one that started it is killed
    os.nice(19 if is_slow else 0)  # the others come first
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)  # for what frameworks log, C++ code included
    try:
        found = {"installed": True, **adapters.adapter_named(name).describe()}
    except Exception as error:
        found = {"installed": False, "why": why_broken(name, error)}
    pipe.send(json.dumps(found))  # a version may be an object of the framework's
    again = pipe.recv()
    try:
        test = selftest.result_of(adapters.adapter_named(name), pipe.send, again=again)
    except Exception as error:
        test = {"problem": f"{type(error).__name__}: {error}"}
    pipe.send(test)


def _description(name: str, pipe: Connection) -> dict[str, Any]:
    try:
        if pipe.poll():
            description: dict[str, Any] = json.loads(pipe.recv())
            return description
    except EOFError:
        return {"installed": False, "why": why_broken(name, SystemError("the process ended"))}
    found = [one for package in (name, f"{name}-cpu") for one in metadata.distributions(name=package)]
    notes = [f"not asked for devices, since it takes long to load: polyamp doctor {name} waits for it"]
    return {"installed": True, "version": found[0].version if found else "", "devices": [], "notes": notes}


def _tested(
    name: str, process: BaseProcess, pipe: Connection, again: bool, report: Callable[[str], object]
) -> dict[str, Any]:
    """Let a process test its devices; return its result, or how far it came, and report each part."""
    test: dict[str, Any] = {"devices": {}, "notes": [], "kept": None, "problem": None}
    doing = "its start"
    try:
        pipe.send(again)
        while pipe.poll(_LIMIT):
            answer = pipe.recv()
            if not isinstance(answer, str):
                return {**test, **answer}
            doing = answer
            report(f"{name}: {doing}")
        how = f"there was no answer for {_LIMIT:.0f} seconds"
    except (EOFError, OSError):
        process.join()
        how = f"the process ended with exit code {process.exitcode}"
    finally:
        process.kill()
    return {**test, "problem": f"{how}, in {doing}"}


def is_wrong(found: dict[str, Any]) -> bool:
    """Return whether a test found a format wrong, or did not end."""
    tests = found.get("selftest", {}).values()
    findings = [one for test in tests for device in test["devices"].values() for one in device]
    return any(test["problem"] for test in tests) or any(one["verdict"] == "wrong" for one in findings)


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
    """Return the verdict on a format, and its speed relative to float32."""
    verdict, speed = str(finding["verdict"]), finding["speed"]
    if finding["format"] == "float32" or speed is None:
        return verdict
    word = "fast " if speed >= selftest.FAST else "slow " if speed <= selftest.SLOW else ""
    return f"{verdict}, {word}{speed:g}"
