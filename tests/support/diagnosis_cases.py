"""Observations made by hand, for the tests of the core's conclusions."""

import math
from collections.abc import Iterable

from polyamp.diagnosis.recording import Kind, Observation, Recording
from polyamp.diagnosis.spread import LOWEST, Spread


def count_values(values: Iterable[float]) -> Spread:
    """Count numbers one by one."""
    numbers = [abs(float(value)) for value in values]
    counts, mass = [0] * 255, [0.0] * 255
    finite = [number for number in numbers if math.isfinite(number)]
    for number in filter(None, finite):
        place = max(math.frexp(number)[1] - 1, LOWEST) - LOWEST
        counts[place] += 1
        mass[place] += number
    inf, nan = sum(map(math.isinf, numbers)), sum(map(math.isnan, numbers))
    total, largest = len(numbers), max(finite, default=0.0)
    return Spread(total, total, finite.count(0.0), inf, nan, largest, tuple(counts), tuple(mass))


def observation(
    kind: Kind, where: str, *values: float, name: str = "matmul", format_name: str = "float16"
) -> Observation:
    op_class = "lower" if format_name == "float16" else "full"
    return Observation(kind, name, where, op_class, format_name, (len(values),), count_values(values))


def recording(*observations: Observation, scale: float = 1.0) -> Recording:
    return Recording("torch", "mixed_float16", 0.5, scale, observations)
