"""Devices that are wrong or slow in one format: an adapter's trial, with one operation done worse."""

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from polyamp.selftest import OPERATIONS

Array = np.ndarray[Any, Any]
Trial = Callable[[str, tuple[Array, ...], str, str], tuple[Array, Callable[[int], object]]]
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def numpy_trial(
    operation: str, arrays: tuple[Array, ...], format_name: str, device: str
) -> tuple[Array, Callable[[int], object]]:
    """Compute in float32 with NumPy and round to the format, as a right device does."""

    def run(times: int) -> list[Array]:
        return [OPERATIONS[operation].exact(*arrays).astype(DTYPES[format_name]) for _ in range(times)]

    return run(1)[0].astype(np.float64), run


@dataclasses.dataclass
class Broken:
    """A device that computes one operation in one format by a function, and everything else as it did."""

    trial: Trial
    operation: str
    format_name: str
    worse: Callable[..., Array]

    def __call__(
        self, operation: str, arrays: tuple[Array, ...], format_name: str, device: str
    ) -> tuple[Array, Callable[[int], object]]:
        result, run = self.trial(operation, arrays, format_name, device)
        if (operation, format_name) == (self.operation, self.format_name):
            result = self.worse(result, *arrays)
        return result, run


def with_nan(result: Array, *arrays: Array) -> Array:
    """The result with a NaN in it."""
    return np.where(np.arange(result.size).reshape(result.shape) == result.size // 2, np.nan, result)


def added_in(dtype: Any) -> Callable[..., Array]:
    """A product whose sums are rounded to a format after every addition."""

    def product(result: Array, first: Array, second: Array) -> Array:
        total = np.zeros_like(result, dtype)
        for column, row in zip(first.T, second, strict=True):
            total = (total.astype(np.float32) + np.outer(column, row)).astype(dtype)
        return total.astype(np.float64)

    return product


def with_rounded_inputs(bits: int) -> Callable[..., Array]:
    """A product of numbers that are rounded to some bits after the leading one, as TF32 has 10."""

    def rounded(values: Array) -> Array:
        mantissa, exponent = np.frexp(values.astype(np.float64))
        return np.ldexp(np.round(mantissa * 2 ** (bits + 1)) / 2 ** (bits + 1), exponent)

    return lambda result, first, second: rounded(first) @ rounded(second)


def slower(trial: Trial, operation: str, format_name: str) -> Trial:
    """A device that computes one operation in one format twenty times instead of once."""

    def slow(name: str, arrays: tuple[Array, ...], chosen: str, device: str) -> tuple[Array, Callable[[int], object]]:
        result, run = trial(name, arrays, chosen, device)
        more = 20 if (name, chosen) == (operation, format_name) else 1
        return result, lambda times: run(more * times)

    return slow
