"""Sizes and policies of the small language models that are damaged on purpose, the same for every framework.

They predict the next word of Python's manual from the four before it, with a norm of the words that has BERT's epsilon,
1e-12. In float16 that is 0: of a word without an embedding it divides 0 by 0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import polyamp
from polyamp import LossScale
from polyamp.equivalence.comparison import Comparison

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from models.data import words

VOCABULARY, CONTEXT, WIDTH, HIDDEN = 256, 4, 16, 32
BATCH, STEPS, RATE = 64, 30, 0.1
TEST = 500
POLICIES = {
    "undamaged": polyamp.policy("mixed_float16"),
    "norm in 16 bits": polyamp.policy("mixed_float16", rules={"norm/*": "lower"}),
    "log softmax in 16 bits": polyamp.policy("mixed_float16", rules={"probabilities/*": "lower"}),
    "scale too small": polyamp.policy("mixed_float16", loss_scale=LossScale.fixed(2.0**-20)),
}


def windows() -> NDArray[Any]:
    """Return all rows of words: those before, and the next one. The first `TEST` rows are for the test."""
    return np.lib.stride_tricks.sliding_window_view(words(VOCABULARY), CONTEXT + 1)


def rows_of(seed: int) -> NDArray[Any]:
    """Return the rows of each step."""
    random, count = np.random.default_rng(seed), len(windows())
    return TEST + np.stack([random.integers(count - TEST, size=BATCH) for _ in range(STEPS)])


def compared(predict: Callable[..., Any]) -> dict[str, Comparison]:
    """Return each policy's comparison with float32."""
    found = polyamp.parity(predict, [*POLICIES.values()], seeds=5, margin="1%", controls=False, progress=False)
    return dict(zip(POLICIES, found.comparisons, strict=True))
