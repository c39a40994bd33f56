"""``policy("auto")``: the fastest 16-bit policy that is right on the devices of the loaded frameworks."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

from polyamp import adapters
from polyamp.selftest import FAST, kept_result, right_formats

_POLICIES = {"bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}
_MEASURE = "polyamp doctor --test measures it"

_log = logging.getLogger(__name__)
_chosen: dict[tuple[str, ...], str] = {}  # by the names of the loaded adapters


def automatic() -> str:
    """Return the name of the policy for the loaded frameworks. It is chosen once, and the log has the reason."""
    loaded = adapters.loaded()
    names = tuple(adapter.name for adapter in loaded)
    if names not in _chosen:
        _chosen[names], why = choose(loaded)
        level = logging.WARNING if _chosen[names] == "float32" else logging.INFO  # nothing is faster: tell the user
        _log.log(level, 'policy("auto") is %s: %s', _chosen[names], why)
    return _chosen[names]


def choose(loaded: Iterable[Any]) -> tuple[str, str]:
    """Return the name of a policy, and why: the fastest format that is right and fast in each of these frameworks.

    float16 is chosen instead of bfloat16 only if it is clearly faster, because it needs a loss scale.
    """
    described = {adapter.name: adapter.describe() for adapter in loaded}
    found = {name: _speeds(name, one) for name, one in described.items() if one["devices"]}
    if not found:
        return "float32", "no framework is loaded; import yours first"
    why = "; ".join(reason for _, reason in found.values())
    speeds = {
        format_name: min(speed.get(format_name, 0.0) for speed, _ in found.values()) / (FAST if is_scaled else 1)
        for format_name, is_scaled in (("bfloat16", False), ("float16", True))
        if all(speed.get(format_name, 0.0) >= FAST for speed, _ in found.values())
    }
    return (_POLICIES[max(speeds, key=speeds.__getitem__)] if speeds else "float32"), why


def _speeds(name: str, described: Mapping[str, Any]) -> tuple[dict[str, float], str]:
    """Return the speed of each format that is right on a framework's first device, and how that is known."""
    device, kept = described["devices"][0], kept_result(name, described)
    if kept is None:
        fast = [format_name for format_name in _POLICIES if format_name in device["fast"]]
        units = ", ".join(fast) or "no 16-bit format"
        return dict.fromkeys(fast, math.inf), f"{name} {device['name']} has units for {units}, untested: {_MEASURE}"
    speeds = {
        format_name: math.sqrt(speed["matmul"] * speed["conv"])
        for format_name, speed in right_formats(kept["devices"][device["name"]]).items()
        if format_name in _POLICIES
    }
    shown = ", ".join(f"{format_name} {speed:.2g}" for format_name, speed in speeds.items())
    return speeds, f"{name} {device['name']} by its self-test, right and times float32's speed: {shown or 'nothing'}"
