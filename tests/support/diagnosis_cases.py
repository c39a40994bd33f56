"""Observations made by hand, for the tests of the core's conclusions."""

from __future__ import annotations

from polyamp.diagnosis.recording import Kind, Observation, Recording
from polyamp.diagnosis.spread import Spread


def observation(
    kind: Kind, where: str, *values: float, name: str = "matmul", format_name: str = "float16"
) -> Observation:
    op_class = "lower" if format_name == "float16" else "full"
    return Observation(kind, name, where, op_class, format_name, (len(values),), Spread.of(values))


def recording(*observations: Observation, scale: float = 1.0) -> Recording:
    return Recording("torch", "mixed_float16", 0.5, scale, observations)
