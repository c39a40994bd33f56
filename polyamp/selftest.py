"""The self-test of ``polyamp doctor --test``: which formats are right on a device, and how fast they are there.

An adapter runs one operation in one format on one device (``trial``). Everything else is here: inputs that every format
holds exactly, results in float64, bounds on the error, verdicts, rounds of timing, and the file that keeps them.

For example, a product of depth 4096 adds numbers between 0 and 1. A device that multiplies float16 and adds in float32
is as exact there as one rounding to float16, 0.0005. One that adds in float16 is off by 0.1, and by 0.002 at depth 16.
So an error that grows with the depth tells that a device adds in 16 bits.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from polyamp.errors import PolyampError
from polyamp.formats import FORMATS, cpu_flags
from polyamp.report import cache_folder, finite, write_json
from polyamp.version import __version__

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]
    Run = Callable[[int], object]  # runs an operation so many times, and waits for the device
    Trial = Callable[[str, "tuple[Array, ...]", str, str], "tuple[Array, Run]"]

TESTED = ("float32", "float16", "bfloat16")
DEPTHS = (16, 4096, 4093)  # shallow; deep; deep, and not a multiple of 8
WIDTHS, LEAST_SECONDS = (256, 1024, 4096), 5e-4  # the first width at which float32 takes so long
ROWS = 32  # of a result that are compared
TURN_SECONDS = 2e-3  # float32 runs about so long without a wait, so that a GPU does not wait for the host
ROUNDS, PATIENCE = 15, 0.1  # of timing one operation: at most so many, and no more after so many seconds
DECISIVE = ("matmul", "conv")  # most of the time of a training step
FAST, SLOW = 1.1, 0.9  # times as fast as float32; in between, as fast as it
GROWTH = 4  # times the error of a shallow sum that a deep one has if it is not added in float32


# --- operations: their inputs, and their results in float64 ----------------------------------------------------------


class Operation(NamedTuple):
    """An operation to test."""

    inputs: Callable[[Callable[..., Array], int, int], tuple[Array, ...]]  # drawn for a width and a depth
    exact: Callable[..., Array]
    roundings: int  # to its format, that a right implementation makes one after the other


def _conv(images: Array, kernel: Array) -> Array:
    """Convolve images (number, height, width, channels) with a kernel (height, width, channels, outputs)."""
    import numpy as np

    windows = np.lib.stride_tricks.sliding_window_view(images, kernel.shape[:2], axis=(1, 2))
    return np.tensordot(windows, kernel.transpose(2, 0, 1, 3), axes=3)


def _softmax(values: Array) -> Array:
    import numpy as np

    powers = np.exp(values)
    shares: Array = powers / powers.sum(-1, keepdims=True)
    return shares


def _layer_norm(values: Array) -> Array:
    centred = values - values.mean(-1, keepdims=True)
    normed: Array = centred / (values.var(-1, keepdims=True) + 1e-5) ** 0.5
    return normed


def _attention(query: Array, key: Array, value: Array) -> Array:
    query, key, value = (one.swapaxes(0, 1) for one in (query, key, value))  # to (head, position, feature)
    mixed: Array = _softmax(query @ key.swapaxes(1, 2) / query.shape[-1] ** 0.5) @ value
    return mixed.swapaxes(0, 1)


OPERATIONS: dict[str, Operation] = {
    "matmul": Operation(lambda draw, width, depth: (draw(width, depth), draw(depth, width)), lambda a, b: a @ b, 3),
    "conv": Operation(
        lambda draw, width, depth: (
            draw(max(8, width // 32), 16, 16, -(-depth // 8)),
            draw(3, 3, -(-depth // 8), width // 8),
        ),
        _conv,
        8,
    ),
    "layer_norm": Operation(lambda draw, width, depth: (draw(width, depth) - 0.5,), _layer_norm, 8),
    "softmax": Operation(lambda draw, width, depth: (4 * draw(width, depth) - 2,), _softmax, 8),
    "attention": Operation(
        lambda draw, width, depth: (2 * draw(width, 4, 64) - 1, 2 * draw(depth, 4, 64) - 1, draw(depth, 4, 64)),
        _attention,
        8,
    ),
    "sum": Operation(lambda draw, width, depth: (draw(width // 8, 16 * depth),), lambda values: values.sum(-1), 3),
}
"""Sums and products are of positive numbers: then nothing cancels, and the error is relative to the result.

Each row of a result is that of a row of the first input. So a few rows tell the error of a large result.
"""


def inputs_of(name: str, format_name: str, width: int, depth: int) -> tuple[Array, ...]:
    """Return the inputs of an operation: random numbers from 0 to 1 that the format holds exactly, in float32."""
    import numpy as np

    random, steps = np.random.default_rng(0), 2 ** (FORMATS[format_name].mantissa_bits + 1)

    def draw(*shape: int) -> Array:
        few = random.integers(0, steps, min(math.prod(shape), 2**20), dtype=np.int32)  # large inputs repeat them
        return np.resize(few.astype(np.float32) / steps, shape)

    return OPERATIONS[name].inputs(draw, width, depth)


# --- verdicts --------------------------------------------------------------------------------------------------------


def _error(name: str, inputs: Sequence[Array], result: Array) -> float:
    """Return the largest error, relative to the exact number or, where that is larger, to their root mean square."""
    import numpy as np

    if not np.isfinite(result).all():
        return math.inf
    first, *others = (values.astype(np.float64) for values in inputs)
    rows = np.unique(np.linspace(0, len(first) - 1, ROWS, dtype=int))  # with the first and the last
    exact = OPERATIONS[name].exact(first[rows], *others)
    scale = np.maximum(np.abs(exact), np.sqrt(np.mean(exact**2)))
    return float(np.max(np.abs(result[rows].astype(np.float64) - exact) / scale))


def _bound(name: str, format_name: str, depth: int) -> float:
    """Return the largest error of an operation that adds in float32 and rounds to its format.

    Source: rounding errors of a sum of n grow as the root of n; 10 of it are exceeded almost never (Higham and Mary, "A
    new approach to probabilistic rounding error analysis", 2019).
    """
    in_sum = 10 * math.sqrt(16 * depth) * FORMATS["float32"].epsilon / 2  # no operation adds more than 16 * depth terms
    return OPERATIONS[name].roundings * FORMATS[format_name].epsilon / 2 + in_sum


def _judged(name: str, format_name: str, errors: Mapping[int, float]) -> tuple[str, str]:
    """Return the verdict on the errors by depth, and why."""
    bounds = {depth: _bound(name, format_name, depth) for depth in errors}
    if all(errors[depth] <= bounds[depth] for depth in errors):
        return "right", ""
    if not all(map(math.isfinite, errors.values())):
        return "wrong", "NaN or inf from finite numbers"
    worst = max(errors, key=errors.__getitem__)
    found = f"error {errors[worst]:.1e} at depth {worst}, allowed {bounds[worst]:.1e}"
    for other in ("tensorfloat32", "bfloat16") if format_name == "float32" else ():
        if all(error <= bounds[depth] + 2 * FORMATS[other].epsilon for depth, error in errors.items()):
            return "right", f"with the error of {other}: {found} in {format_name} itself"
    shallow, deep, _ = DEPTHS
    if errors[deep] > GROWTH * errors[shallow]:
        return "wrong", f"adds in 16 bits: {found}, and {errors[shallow]:.1e} at depth {shallow}"
    return "wrong", f"an error beyond rounding: {found}"


def check(trial: Trial, device: str, name: str, format_name: str, width: int) -> tuple[dict[str, Any], list[Run]]:
    """Run an operation at each depth; return what was found, and what runs it at the deep ones."""
    finding: dict[str, Any] = {"operation": name, "format": format_name, "error": None, "speed": {}}
    inputs = [inputs_of(name, format_name, *size) for size in zip((64, width, width - 3), DEPTHS, strict=True)]
    try:
        with ThreadPoolExecutor() as threads:  # XLA compiles without Python's lock
            tries = list(threads.map(lambda arrays: trial(name, arrays, format_name, device), inputs))
        results, runs = zip(*tries, strict=True)
        errors = dict(zip(DEPTHS, map(_error, [name] * 3, inputs, results), strict=True))
        verdict, why = _judged(name, format_name, errors)
    except Exception as error:  # each framework refuses with errors of its own
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
        return {**finding, "verdict": "wrong" if format_name == "float32" else "not supported", "why": why}, []
    return {**finding, "verdict": verdict, "why": why, "error": finite(max(errors.values()))}, list(runs[1:])


# --- speed -----------------------------------------------------------------------------------------------------------


def _seconds(run: Run, times: int = 1) -> float:
    began = time.perf_counter()
    run(times)
    return time.perf_counter() - began


def _once(run: Run) -> float:
    """Return the shortest of three times of a function: the first may be longer."""
    return min(map(_seconds, [run] * 3))


def _shortest(runs: Sequence[Run]) -> list[float]:
    """Return the shortest time of each function, run in turns: longer ones are of a machine that did something else."""
    times = math.ceil(TURN_SECONDS / max(_once(runs[0]), LEAST_SECONDS / 10))
    rounds, end = list[list[float]](), time.perf_counter() + PATIENCE
    while len(rounds) < 3 or (len(rounds) < ROUNDS and time.perf_counter() < end):
        rounds.append([_seconds(run, times) for run in runs])
    return [min(seconds) for seconds in zip(*rounds, strict=True)]


def examine(
    trial: Trial,
    device: str,
    report: Callable[[str], object] = lambda text: None,
    operations: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """Test operations in every format on a device, and return a finding for each.

    Args:
        trial: the adapter's verb.
        device: the first word of the device's name in `polyamp.adapters.Adapter.describe`.
        report: is called with what is tested next.
        operations: these; by default all.
    """
    findings = []
    for name in operations or OPERATIONS:
        report(f"{name} in float32 on {device}")
        for width in WIDTHS:
            tests = [check(trial, device, name, "float32", width)]
            runs = tests[0][1]
            if not runs or _once(runs[0]) >= LEAST_SECONDS:
                break
        for format_name in TESTED[1:]:
            report(f"{name} in {format_name} on {device}")
            tests.append(check(trial, device, name, format_name, width))
        findings += [finding for finding, _ in tests]
        report(f"the speed of {name} on {device}")
        timed = [test for test in tests if test[1]]
        for place, size in enumerate(("aligned", "unaligned") if runs else ()):
            shortest = _shortest([runs[place] for _, runs in timed])
            for (finding, _), seconds in zip(timed, shortest, strict=True):
                finding["speed"][size] = round(shortest[0] / max(seconds, 1e-9), 2)
    return findings


def right_formats(findings: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the formats that are right on a device, with the speed of ``matmul`` and ``conv`` in each.

    A format is right if products and convolutions are, and nothing else is wrong. Speeds are relative to float32, for
    sizes that are multiples of 8.

    >>> found = {"operation": "matmul", "format": "float16", "verdict": "right", "speed": {"aligned": 2.0}}
    >>> right_formats([found, {**found, "operation": "conv", "speed": {"aligned": 1.5}}])
    {'float16': {'matmul': 2.0, 'conv': 1.5}}
    >>> right_formats([found, {**found, "operation": "conv", "verdict": "wrong"}])
    {}
    """
    speeds: dict[str, dict[str, float]] = {}
    wrong = set()
    for one in findings:
        if one["verdict"] == "wrong":
            wrong.add(one["format"])
        elif one["verdict"] == "right" and one["operation"] in DECISIVE:
            speeds.setdefault(one["format"], {})[one["operation"]] = one["speed"].get("aligned", 1.0)
    return {name: speed for name, speed in speeds.items() if len(speed) == len(DECISIVE) and name not in wrong}


# --- notes -----------------------------------------------------------------------------------------------------------

KNOWN: dict[str, tuple[str, str]] = {
    r"GTX 16\d\d": ("float16 convolutions return NaN", "https://github.com/pytorch/pytorch/issues/58123"),
    r"\bT(400|550|600|1000|1200|2000)\b|K40m": (
        "losses under float16 autocast become NaN",
        "https://github.com/ultralytics/ultralytics/pull/17977",
    ),
}
"""Devices by name, what was reported of them, and where."""


def notes_on(device: Mapping[str, Any], findings: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return sentences about a device: what is not simply right, and claims that do not hold."""
    notes = []
    for one in findings:
        format_name, speed = one["format"], one["speed"].get("aligned", 1)
        what = f"{one['operation']} in {format_name}"
        if one["why"]:
            notes.append(f"{what} is {one['verdict']}{', ' if one['verdict'] == 'right' else ': '}{one['why']}")
        has_units = format_name in device["fast"]
        if one["operation"] in DECISIVE and format_name != "float32" and speed < (FAST if has_units else SLOW):
            claim = f"units for {format_name}, but" if has_units else f"no units for {format_name}, and"
            notes.append(f"the device reports {claim} {what} runs at {speed:g} times float32's speed")
    for pattern, (said, link) in KNOWN.items():
        if re.search(pattern, device["name"], re.IGNORECASE):
            notes.append(f"{said} ({link})")
    return [f"{device['name']}: {note}" for note in notes]


# --- a framework's test, and the file that keeps it ------------------------------------------------------------------


def result_of(adapter: Any, report: Callable[[str], object], *, again: bool) -> dict[str, Any]:
    """Test the devices of an adapter's framework, or return what is kept of an earlier test, unless ``again``."""
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
    key = [
        __version__,
        str(described["version"]),
        [device["name"] for device in described["devices"]],
        driver.read_text() if driver.exists() else "",
        [*sorted(cpu_flags()), os.cpu_count()],
        described.get("settings", {}),
    ]
    return cache_folder() / f"selftest-{name}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:20]}.json"
