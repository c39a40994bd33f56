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
from contextlib import suppress
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
SHAPES = ((64, 16), (64, 4096), (61, 509))  # width and depth: shallow, deep, and not a multiple of 8
WIDTHS = (512, 1024, 2048, 4096)  # for timing: the first that takes float32 as long as this
LEAST_SECONDS = 5e-4
TURN_SECONDS = 2e-3  # float32 runs about so long without a wait, so that a GPU does not wait for the host
ROUNDS, PATIENCE = 15, 0.2  # of timing one operation: at most so many, and no more after so many seconds
FAST, SLOW = 1.1, 0.9  # times as fast as float32; in between, as fast as it
GROWTH = 4  # times the error of a shallow sum that a deep one has if it is not added in float32
NOT_FINITE = "NaN or inf from finite numbers"


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
    mixed: Array = _softmax(query @ key.swapaxes(-1, -2) / query.shape[-1] ** 0.5) @ value
    return mixed


OPERATIONS: dict[str, Operation] = {
    "matmul": Operation(lambda draw, width, depth: (draw(width, depth), draw(depth, width)), lambda a, b: a @ b, 3),
    "conv": Operation(
        lambda draw, width, depth: (
            draw(max(8, width // 16), 16, 16, -(-depth // 8)),
            draw(3, 3, -(-depth // 8), width // 8),
        ),
        _conv,
        8,
    ),
    "layer_norm": Operation(lambda draw, width, depth: (draw(4 * width, depth) - 0.5,), _layer_norm, 8),
    "softmax": Operation(lambda draw, width, depth: (4 * draw(4 * width, depth) - 2,), _softmax, 8),
    "attention": Operation(
        lambda draw, width, depth: (2 * draw(4, width, 64) - 1, 2 * draw(4, depth, 64) - 1, draw(4, depth, 64)),
        _attention,
        8,
    ),
    "sum": Operation(lambda draw, width, depth: (draw(width // 8, 16 * depth),), lambda values: values.sum(-1), 3),
}
"""Sums and products are of positive numbers: then nothing cancels, and the error is relative to the result."""


def inputs_of(name: str, format_name: str, width: int, depth: int) -> tuple[Array, ...]:
    """Return the inputs of an operation: random numbers from 0 to 1 that the format holds exactly, in float32."""
    import numpy as np

    random, steps = np.random.default_rng(0), 2 ** (FORMATS[format_name].mantissa_bits + 1)

    def draw(*shape: int) -> Array:
        few = random.integers(0, steps, min(math.prod(shape), 2**20), dtype=np.int32)  # large inputs repeat them
        return np.resize(few.astype(np.float32) / steps, shape)

    return OPERATIONS[name].inputs(draw, width, depth)


# --- verdicts --------------------------------------------------------------------------------------------------------


def _error(result: Array, exact: Array) -> float:
    """Return the largest error, relative to the exact number or, where that is larger, to their root mean square."""
    import numpy as np

    scale = np.maximum(np.abs(exact), np.sqrt(np.mean(exact**2)))
    return float(np.max(np.abs(result - exact) / scale)) if np.isfinite(result).all() else math.inf


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
        return "wrong", NOT_FINITE
    worst = max(errors, key=errors.__getitem__)
    found = f"error {errors[worst]:.1e} at depth {worst}, allowed {bounds[worst]:.1e}"
    for other in ("tensorfloat32", "bfloat16") if format_name == "float32" else ():
        if all(error <= bounds[depth] + 2 * FORMATS[other].epsilon for depth, error in errors.items()):
            return "right", f"with the error of {other}: {found} in {format_name} itself"
    shallow, deep = min(errors), max(errors)
    if errors[deep] > GROWTH * errors[shallow]:
        return "wrong", f"adds in 16 bits: {found}, and {errors[shallow]:.1e} at depth {shallow}"
    return "wrong", f"an error beyond rounding: {found}"


def check(trial: Trial, device: str, name: str, format_name: str) -> dict[str, Any]:
    """Run an operation in its shapes, and return what was found."""
    import numpy as np

    finding: dict[str, Any] = {"operation": name, "format": format_name, "error": None, "speed": {}}
    errors = {}
    for width, depth in SHAPES:
        inputs = inputs_of(name, format_name, width, depth)
        try:
            result, _ = trial(name, inputs, format_name, device)
        except Exception as error:  # each framework refuses with errors of its own
            verdict = "wrong" if format_name == "float32" else "not supported"
            return {**finding, "verdict": verdict, "why": _in_a_line(error)}
        exact = OPERATIONS[name].exact(*(values.astype(np.float64) for values in inputs))
        errors[depth] = _error(result, exact)
    finding["verdict"], finding["why"] = _judged(name, format_name, errors)
    return {**finding, "error": finite(max(errors.values()))}


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


# --- speed -----------------------------------------------------------------------------------------------------------


def _seconds(run: Run, times: int = 1) -> float:
    began = time.perf_counter()
    run(times)
    return time.perf_counter() - began


def _shortest(runs: Iterable[Run], times: int) -> list[float]:
    """Return the shortest time of each function, run in turns: longer ones are of a machine that did something else."""
    runs, rounds, end = list(runs), list[list[float]](), time.perf_counter() + PATIENCE
    while len(rounds) < 3 or (len(rounds) < ROUNDS and time.perf_counter() < end):
        rounds.append([_seconds(run, times) for run in runs])
    return [min(seconds) for seconds in zip(*rounds, strict=True)]


def _time(trial: Trial, device: str, findings: Sequence[dict[str, Any]]) -> None:
    """Write into the findings of one operation, float32's first, how many times as fast as float32 each format is."""
    import numpy as np

    def run_of(finding: dict[str, Any], size: int) -> Run:
        name, format_name = finding["operation"], finding["format"]
        result, run = trial(name, inputs_of(name, format_name, size, size), format_name, device)
        if not np.isfinite(result).all():
            finding.update(verdict="wrong", why=f"{NOT_FINITE}, at size {size}")
        return run

    timed = [one for one in findings if one["verdict"] != "not supported"]
    for width in WIDTHS:
        seconds = min(map(_seconds, [run_of(timed[0], width)] * 3))
        if seconds >= LEAST_SECONDS:
            break
    times = round(TURN_SECONDS / min(max(seconds, LEAST_SECONDS / 10), TURN_SECONDS))
    for kind, size in (("aligned", width), ("unaligned", width - 3)):
        shortest = _shortest([run_of(one, size) for one in timed], times)
        for finding, taken in zip(timed, shortest, strict=True):
            finding["speed"][kind] = round(shortest[0] / max(taken, 1e-9), 2)


def examine(
    trial: Trial,
    device: str,
    report: Callable[[str], None] = lambda text: None,
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
        of_name = []
        for format_name in TESTED:
            report(f"{name} in {format_name} on {device}")
            of_name.append(check(trial, device, name, format_name))
        if of_name[0]["error"] is not None:  # float32 runs, so there is something to compare with
            report(f"the speed of {name} on {device}")
            try:
                _time(trial, device, of_name)
            except Exception as error:  # a large size may need more memory than there is
                of_name[0]["why"] = f"{of_name[0]['why']} it is not timed: {_in_a_line(error)}".strip()
        findings += of_name
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
    findings = list(findings)
    wrong = {one["format"] for one in findings if one["verdict"] == "wrong"}
    speeds: dict[str, dict[str, float]] = {}
    for one in findings:
        if one["operation"] in ("matmul", "conv") and one["verdict"] == "right" and one["format"] not in wrong:
            speeds.setdefault(one["format"], {})[one["operation"]] = one["speed"].get("aligned", 1.0)
    return {name: speed for name, speed in speeds.items() if len(speed) == 2}


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
    name, notes = device["name"], []
    for one in findings:
        if one["why"]:
            said = ", " if one["verdict"] == "right" else ": "
            notes.append(f"{name}: {one['operation']} in {one['format']} is {one['verdict']}{said}{one['why']}")
        speed = one["speed"].get("aligned", 1.0)
        if one["operation"] in ("matmul", "conv") and one["format"] != "float32":
            does, has = f"{one['operation']} in {one['format']} runs at {speed:g} times float32's speed", device["fast"]
            if one["format"] in has and speed < FAST:
                notes.append(f"{name}: the device reports units for {one['format']}, but {does}")
            elif one["format"] not in has and speed < SLOW:
                notes.append(f"{name}: the device reports no units for {one['format']}, and {does}")
    known = [said for pattern, said in KNOWN.items() if re.search(pattern, name, re.IGNORECASE)]
    return [*notes, *(f"{name}: {text} ({link})" for text, link in known)]


# --- a framework's test, and the file that keeps it ------------------------------------------------------------------


def result_of(adapter: Any, report: Callable[[str], None], *, again: bool) -> dict[str, Any]:
    """Test the devices of an adapter's framework, or return what is kept of an earlier test, unless ``again``."""
    if not hasattr(adapter, "trial"):
        return {"devices": {}, "notes": ["its adapter has no self-test"], "kept": None}
    described = adapter.describe()
    kept = None if again else kept_result(adapter.name, described)
    if kept is not None:
        return {**kept, "kept": str(_file(adapter.name, described))}
    devices, notes = {}, [f"{name}: {value}" for name, value in described.get("settings", {}).items() if value]
    for device in described["devices"]:
        findings = devices[device["name"]] = examine(adapter.trial, device["name"].split()[0], report)
        notes += notes_on(device, findings)
    found = {"devices": devices, "notes": notes}
    try:
        file = _file(adapter.name, described)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json({"of": _key(adapter.name, described), "found": found}, file)
    except (OSError, PolyampError) as error:
        notes.append(f"the result is not kept: {str(error).partition(chr(10))[0]}; POLYAMP_CACHE names another folder")
    return {**found, "kept": None}


def kept_result(name: str, described: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what is kept of a test of these devices, driver and versions; None if nothing is, or it is damaged."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        saved = json.loads(_file(name, described).read_text())
        findings = [one for device in saved["found"]["devices"].values() for one in device]
        whole = all(one.keys() >= {"operation", "format", "verdict", "why", "speed", "error"} for one in findings)
        if saved["of"] == _key(name, described) and whole:
            return {"devices": saved["found"]["devices"], "notes": [*map(str, saved["found"]["notes"])]}
    return None


def _key(name: str, described: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that the result of a test depends on, as JSON values."""
    driver = Path("/proc/driver/nvidia/version")
    return {
        "polyamp": __version__,
        "framework": f"{name} {described['version']}",
        "devices": [device["name"] for device in described["devices"]],
        "driver": driver.read_text() if driver.exists() else "",
        "processor": [*sorted(cpu_flags()), os.cpu_count()],
        "settings": described.get("settings", {}),
    }


def _file(name: str, described: Mapping[str, Any]) -> Path:
    key = json.dumps(_key(name, described), sort_keys=True)
    return cache_folder() / f"selftest-{name}-{hashlib.sha256(key.encode()).hexdigest()[:20]}.json"
