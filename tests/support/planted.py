"""Data and sizes of the small trainings that are damaged on purpose, the same for every framework."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

BATCH, STEPS, HIDDEN = 256, 40, 48
RATE = 0.2
FITTING, OVERFLOWING = 2.0**14, 2.0**18
"""Largest input: as of a sensor of 14 bits, with which float16 holds all values; and one with which it does not."""
TRAINED = 1280


@functools.cache
def digits(largest: float) -> tuple[NDArray[Any], ...]:
    """Return counts from 0 to ``largest`` and labels, of training and of test."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    x, y = (data.data / 16 * largest).astype(np.float32)[order], data.target.astype(np.int64)[order]
    return x[:TRAINED], y[:TRAINED], x[TRAINED:], y[TRAINED:]


def rows_of(seed: int) -> NDArray[Any]:
    """Return the rows of each step."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.choice(TRAINED, BATCH, replace=False) for _ in range(STEPS)])
