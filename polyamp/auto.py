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
    described = [(adapter, adapter.describe()) for adapter in loaded]
    found = [_over_ranks(adapter, *_speeds(adapter.name, one)) for adapter, one in described if one["devices"]]
    if not found:
        return "float32", "no framework is loaded; import yours first"
    least = {name: min(speeds[name] for speeds, _ in found) for name in _POLICIES}
    scores = {name: speed / (FAST if name == "float16" else 1) for name, speed in least.items() if speed >= FAST}
    best = max(scores, key=scores.__getitem__, default=None)
    return ("float32" if best is None else _POLICIES[best]), "; ".join(why for _, why in found)


def _over_ranks(adapter: Any, speeds: Mapping[str, float], why: str) -> tuple[dict[str, float], str]:
    """Return the least speed of each format on any rank, so that all ranks choose the same, and why."""
    own = [speeds.get(name, 0.0) for name in _POLICIES]
    least = adapter.least_over_ranks(own) if hasattr(adapter, "least_over_ranks") else own
    slower = [name for name, one, other in zip(_POLICIES, least, own, strict=True) if one < other * (1 - 1e-6)]
    if slower:  # by more than the rounding to float32, which ranks exchange
        why += f"; slower, or not right, on another rank: {', '.join(slower)}"
    return dict(zip(_POLICIES, least, strict=True)), why


def _speeds(name: str, described: Mapping[str, Any]) -> tuple[dict[str, float], str]:
    """Return the speed of each format that is right on a framework's current device, and how that is known."""
    device, kept = described["devices"][described.get("current", 0)], kept_result(name, described)
    if kept is None:
        fast = [one for one in _POLICIES if one in device["fast"]]
        units = f"has units for {', '.join(fast) or 'no 16-bit format'}"
        return dict.fromkeys(fast, math.inf), f"{name} {device['name']} {units}, untested: {_MEASURE}"
    right = right_formats(kept["devices"][device["name"]])
    speeds = {one: math.sqrt(right[one]["matmul"] * right[one]["conv"]) for one in _POLICIES if one in right}
    shown = ", ".join(f"{one} {speed:.2g}" for one, speed in speeds.items())
    return speeds, f"{name} {device['name']} by its self-test, right and times float32's speed: {shown or 'nothing'}"
