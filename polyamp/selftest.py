"""The self-test of ``polyamp doctor --test``: which formats are right on a device, and how fast they are there.

An adapter runs one operation in one format on one device (``trial``). Everything else is here: inputs that every format
holds exactly, results in float64, a bound on the error, rounds of timing, and the file that keeps the result.

For example, a product of depth 4096 adds numbers between 0 and 1. A device that multiplies float16 and adds in float32
is as exact there as one rounding to float16, 0.0005. One that adds in float16 is off by 0.1.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import timeit
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from polyamp.errors import PolyampError
from polyamp.formats import FORMATS, cpu_flags
from polyamp.report import cache_folder, finite, write_json
from polyamp.version import __version__

Array = Any  # of NumPy, which is loaded for a test alone
Run = Callable[[int], object]  # runs an operation so many times, and waits for the device
Trial = Callable[[str, tuple[Array, ...], str, str], tuple[Array, Run]]

TESTED = ("float32", "float16", "bfloat16")
DEPTHS = (4096, 4093)  # a multiple of 8, whose time is taken, and not one
WIDTHS, LEAST_SECONDS = (256, 1024, 4096), 5e-4  # the first width at which float32 takes so long
ROWS = 32  # of a result that are compared
TURN_SECONDS, TURNS = 2e-3, 5  # float32 runs about so long without a wait, so that a GPU does not wait for the host
DECISIVE = ("matmul", "conv")  # most of the time of a training step
FAST, SLOW = 1.1, 0.9  # times as fast as float32; in between, as fast as it


# --- operations: their inputs, and their results in float64 ----------------------------------------------------------


class Operation(NamedTuple):
    """An operation to test."""

    shapes: Callable[[int, int], tuple[tuple[int, ...], ...]]  # of its inputs, for a width and a depth
    exact: Callable[..., Array]
    terms: int  # how many it adds, in depths


def _conv(images: Array, kernel: Array) -> Array:
    """Convolve images (number, height, width, channels) with a kernel (height, width, channels, outputs)."""
    import numpy as np

    windows = np.lib.stride_tricks.sliding_window_view(images, kernel.shape[:2], axis=(1, 2))
    return np.tensordot(windows, kernel.transpose(2, 0, 1, 3), axes=3)


OPERATIONS: dict[str, Operation] = {
    "matmul": Operation(lambda width, depth: ((width, depth), (depth, width)), lambda a, b: a @ b, 1),
    "conv": Operation(lambda width, depth: ((width // 32, 9, 9, depth // 8), (3, 3, depth // 8, width // 8)), _conv, 2),
    "sum": Operation(lambda width, depth: ((width // 8, 16 * depth),), lambda values: values.sum(-1), 16),
}
"""Sums and products are of positive numbers: then nothing cancels, and the error is relative to the result.

Each row of a result is that of a row of the first input. So a few rows tell the error of a large result.
"""


def inputs_of(name: str, format_name: str, width: int, depth: int) -> tuple[Array, ...]:
    """Return the inputs of an operation: random numbers from 0 to 1 that the format holds exactly, in float32."""
    import numpy as np

    random, steps = np.random.default_rng(0), 2 ** (FORMATS[format_name].mantissa_bits + 1)
    few = random.integers(0, steps, 2**20, dtype=np.int32).astype(np.float32) / steps  # large inputs repeat them
    return tuple(np.resize(random.permutation(few), shape) for shape in OPERATIONS[name].shapes(width, depth))


# --- verdicts --------------------------------------------------------------------------------------------------------


def _error(name: str, inputs: Sequence[Array], result: Array) -> float:
    """Return the largest error, relative to the exact number."""
    import numpy as np

    first, *others = (values.astype(np.float64) for values in inputs)
    rows = np.unique(np.linspace(0, len(first) - 1, ROWS, dtype=int))  # with the first and the last
    exact = OPERATIONS[name].exact(first[rows], *others)
    return float(np.max(np.abs(result[rows].astype(np.float64) / exact - 1))) if np.isfinite(result).all() else math.inf


def _bound(name: str, format_name: str, depth: int) -> float:
    """Return the largest error of an operation that adds in float32 and rounds a few times to its format.

    Source: errors of a sum of n grow as the root of n; 10 times that is almost never exceeded (Higham and Mary, "A
    new approach to probabilistic rounding error analysis", 2019).
    """
    in_sum = 10 * math.sqrt(OPERATIONS[name].terms * depth) * FORMATS["float32"].epsilon / 2
    return 4 * FORMATS[format_name].epsilon + in_sum


def check(trial: Trial, device: str, name: str, format_name: str, width: int) -> tuple[dict[str, Any], Run | None]:
    """Run an operation at each depth; return the finding, and a function that runs it at the first depth."""
    finding: dict[str, Any] = {"operation": name, "format": format_name, "error": 0.0, "speed": None}
    finding |= {"verdict": "right", "why": ""}
    runs = []
    try:
        for depth in DEPTHS:
            inputs = inputs_of(name, format_name, width - depth % 8, depth)
            result, run = trial(name, inputs, format_name, device)
            error, bound = _error(name, inputs, result), _bound(name, format_name, depth)
            runs.append(run)
            finding["error"] = max(finding["error"], error)
            if not error <= bound:
                why = f"error {error:.1e} at depth {depth}, allowed {bound:.1e}"
                finding |= {"verdict": "wrong", "why": why if error < math.inf else "NaN or inf from finite numbers"}
    except Exception as error:  # each framework refuses with errors of its own
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
        finding |= {"verdict": "wrong" if format_name == "float32" else "not supported", "why": why, "error": None}
        return finding, None
    return {**finding, "error": finite(finding["error"])}, runs[0]


# --- speed -----------------------------------------------------------------------------------------------------------


def _shortest(run: Run, times: int = 1) -> float:
    """Return the shortest time of several runs of a function: in longer ones the machine did something else too."""
    return min(timeit.repeat(lambda: run(times), number=1, repeat=TURNS))


def examine(trial: Trial, device: str, report: Callable[[str], object]) -> list[dict[str, Any]]:
    """Test every operation in every format on a device, and return a finding for each; report what is tested next."""
    findings = []
    for name in OPERATIONS:
        report(f"{name} in float32 on {device}")
        for width in WIDTHS:
            tests = [check(trial, device, name, "float32", width)]
            seconds = _shortest(tests[0][1]) if tests[0][1] else math.inf
            if seconds >= LEAST_SECONDS:
                break
        for format_name in TESTED[1:]:
            report(f"{name} in {format_name} on {device}")
            tests.append(check(trial, device, name, format_name, width))
        findings += [finding for finding, _ in tests]
        report(f"the speed of {name} on {device}")
        times = math.ceil(TURN_SECONDS / max(seconds, LEAST_SECONDS / 10))
        speeds = [(finding, _shortest(run, times)) for finding, run in tests if run and tests[0][1]]
        for finding, taken in speeds:
            finding["speed"] = round(speeds[0][1] / max(taken, 1e-9), 2)
    return findings


def right_formats(findings: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the formats that are right on a device, with the speed of ``matmul`` and ``conv`` in each.

    A format is right if products and convolutions are, and nothing else is wrong. Speeds are relative to float32.

    >>> found = {"operation": "matmul", "format": "float16", "verdict": "right", "speed": 2.0}
    >>> right_formats([found, {**found, "operation": "conv", "speed": 1.5}])
    {'float16': {'matmul': 2.0, 'conv': 1.5}}
    >>> right_formats([found, {**found, "operation": "conv", "verdict": "wrong"}])
    {}
    """
    speeds = defaultdict[str, dict[str, float]](dict)
    for one in findings:
        if one["verdict"] == "right" and one["operation"] in DECISIVE:
            speeds[one["format"]][one["operation"]] = one["speed"] or 1.0
    wrong = {one["format"] for one in findings if one["verdict"] == "wrong"}
    return {name: speed for name, speed in speeds.items() if len(speed) == len(DECISIVE) and name not in wrong}


# --- notes -----------------------------------------------------------------------------------------------------------


def notes_on(device: Mapping[str, Any], findings: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return sentences about a device: what is not right, and claims that do not hold."""
    notes = []
    for one in findings:
        format_name, speed = one["format"], one["speed"] or 1.0
        what = f"{one['operation']} in {format_name}"
        if one["why"]:
            notes.append(f"{what} is {one['verdict']}: {one['why']}")
        has_units = format_name in device["fast"]
        if one["operation"] in DECISIVE and format_name != "float32" and speed < (FAST if has_units else SLOW):
            claim = f"units for {format_name}, but" if has_units else f"no units for {format_name}, and"
            notes.append(f"the device reports {claim} {what} runs at {speed:g} times float32's speed")
    return [f"{device['name']}: {note}" for note in notes]


# --- a framework's test, and the file that keeps it ------------------------------------------------------------------


def result_of(adapter: Any, report: Callable[[str], object], *, again: bool) -> dict[str, Any]:
    """Return the result of testing the devices of an adapter's framework, or unless ``again`` a kept earlier one."""
    if not hasattr(adapter, "trial"):
        return {"devices": {}, "notes": ["its adapter has no self-test"], "kept": None}
    described = adapter.describe()
    kept, file = None if again else kept_result(adapter.name, described), _file(adapter.name, described)
    if kept is not None:
        return {**kept, "kept": str(file)}
    devices, notes = {}, [f"{name}: {value}" for name, value in described.get("settings", {}).items() if value]
    for device in described["devices"]:
        findings = devices[device["name"]] = examine(adapter.trial, device["name"].split()[0], report)
        notes += notes_on(device, findings)
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json({"devices": devices, "notes": notes}, file)
    except (OSError, PolyampError) as error:
        notes.append(f"the result is not kept: {str(error).partition(chr(10))[0]}; POLYAMP_CACHE names another folder")
    return {"devices": devices, "notes": notes, "kept": None}


def kept_result(name: str, described: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what is kept of a test of these devices, driver and versions; None if nothing is, or it is damaged."""
    try:
        kept = json.loads(_file(name, described).read_text())
        findings = [one for device in kept["devices"].values() for one in device]
        whole = all(one.keys() >= {"operation", "format", "verdict", "why", "speed", "error"} for one in findings)
        return {"devices": kept["devices"], "notes": [*map(str, kept["notes"])]} if whole else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _file(name: str, described: Mapping[str, Any]) -> Path:
    """Return the file for the result of a test, which is named by all that the result depends on."""
    driver = Path("/proc/driver/nvidia/version")
    machine = [driver.read_text() if driver.exists() else "", *sorted(cpu_flags()), os.cpu_count()]
    devices = [device["name"] for device in described["devices"]]
    key = [__version__, str(described["version"]), devices, machine, described.get("settings", {})]
    return cache_folder() / f"selftest-{name}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:20]}.json"
