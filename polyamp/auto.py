"""``policy("auto")``: the fastest 16-bit policy that is right on the devices of the loaded frameworks."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

from polyamp import adapters
from polyamp.selftest import FAST, kept_result, right_formats

_POLICIES = {"bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}

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
    found = [_speeds(adapter, one) for adapter in loaded if (one := adapter.describe())["devices"]]
    if not found:
        return "float32", "no framework is loaded; import yours first"
    least = {name: min(speeds[place] for speeds, _ in found) for place, name in enumerate(_POLICIES)}
    scores = {name: speed / (FAST if name == "float16" else 1) for name, speed in least.items() if speed >= FAST}
    best = max(scores, key=scores.__getitem__, default="")
    return _POLICIES.get(best, "float32"), "; ".join(why for _, why in found)


def _speeds(adapter: Any, described: Mapping[str, Any]) -> tuple[list[float], str]:
    """Return the speed of each format on a framework's current device, 0 if it is not right, and how that is known.

    Each speed is the least over all ranks, so that all ranks choose the same policy.
    """
    device, kept = described["devices"][described.get("current", 0)], kept_result(adapter.name, described)
    if kept is None:
        speeds = {name: math.inf for name in _POLICIES if name in device["fast"]}
        how = f"has units for {', '.join(speeds) or 'no 16-bit format'}, untested: polyamp doctor --test measures it"
    else:
        right = right_formats(kept["devices"][device["name"]])
        speeds = {name: math.sqrt(math.prod(right[name].values())) for name in _POLICIES if name in right}
        shown = ", ".join(f"{name} {speed:.2g}" for name, speed in speeds.items())
        how = f"by its self-test, right and times float32's speed: {shown or 'nothing'}"
    own = [speeds.get(name, 0.0) for name in _POLICIES]
    least = adapter.least_over_ranks(own) if hasattr(adapter, "least_over_ranks") else own
    slower = [name for name, one, other in zip(_POLICIES, least, own, strict=True) if one < other * (1 - 1e-6)]
    if slower:  # by more than the rounding to float32, which ranks exchange
        how += f"; slower, or not right, on another rank: {', '.join(slower)}"
    return least, f"{adapter.name} {device['name']} {how}"
