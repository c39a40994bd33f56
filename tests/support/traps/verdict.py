"""Judge whether an engine kept a trap: finite wherever float32 is, and equal to it up to the format's roundings."""

from functools import cache

import numpy as np

from polyamp.formats import format_of
from support.traps import TRAPS
from support.traps.engines import Engine, Outcome, torch_float32
from support.traps.trap import Array

KEPT = "kept"


@cache
def expected(name: str) -> Outcome:
    """Return the result of float32, which differs between frameworks only by float32's own roundings."""
    return torch_float32(TRAPS[name])


def verdict(name: str, engine: Engine, low: str) -> str:
    """Return "kept", or the problem in a few words."""
    trap, found = TRAPS[name], engine(TRAPS[name], low)
    within = trap.roundings * 2.0 ** -format_of(low).mantissa_bits
    parts = ("", *expected(name)._fields[1:])
    words = [
        _fault(part, ours, theirs, within) for part, ours, theirs in zip(parts, found, expected(name), strict=True)
    ]
    return next(filter(None, words), KEPT)


def _fault(part: str, found: Array, expected: Array, within: float) -> str:
    known = np.isfinite(expected)
    kind = "NaN" if np.isnan(found[known]).any() else "inf" if np.isinf(found[known]).any() else ""
    if not kind:
        size = np.linalg.norm(expected[known].astype(np.float64))
        error = np.linalg.norm(found[known].astype(np.float64) - expected[known])
        if error <= within * size:
            return ""
        kind = f"off by {error / size:.0%}" if size else "not 0"
    return f"{part} {kind}".strip()
