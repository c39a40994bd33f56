"""The part of the big LSTM that is the same in every framework: sizes, weights, batches and settings, as NumPy arrays.

The published model (Jozefowicz et al., Exploring the Limits of Language Modeling, 2016) embeds 793,471 words in 1,024
numbers, has two LSTM layers of 8,192 cells, each projected to 1,024, and scores every word: `PUBLISHED`. Mixed
Precision Training (Micikevicius et al., 2018) reports that it diverges in float16 without a loss scale and matches
float32 with a scale of 128. `SMALL` keeps the layers and the reason of the stall. It has no dropout, starts every row
of words from a state of 0, scores every word in training too, and Adam trains it in a few large updates.

A loss is the sum over the words of a micro-batch, divided by the words of the whole update, so that the gradients of
the micro-batches, added up in float32, are those of the mean. The softmax pushes a wrong word of probability p down
with a gradient of p / `TOKENS`. In float16 that is zero as soon as p is below `TOKENS` * 2**-25, and wrong words may
keep that much each: together more than all the probability there is.

>>> sum(weight.size for weight in weights(SMALL, seed=0).values())
86528
"""

from typing import NamedTuple

import numpy as np

from models import data


class Sizes(NamedTuple):
    words: int
    cells: int
    projection: int
    """Numbers of a projected state, and of an embedded word."""
    layers: int = 2


PUBLISHED = Sizes(words=793_471, cells=8192, projection=1024)
SMALL = Sizes(words=2048, cells=64, projection=16)

STEPS, MICRO_BATCHES, ROWS, LENGTH = 8, 24, 64, 16
TOKENS = MICRO_BATCHES * ROWS * LENGTH
LEARNING_RATE, EPSILON = 0.03, 1e-8
"""Settings of Adam, whose other ones are 0.9 and 0.999."""
TEST_ROWS = 256


def shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight: rows are outputs, and the gates are input, forget, output and new value."""
    found: dict[str, tuple[int, ...]] = {"embedding.weight": (sizes.words, sizes.projection)}
    for layer in range(sizes.layers):
        found[f"layers.{layer}.gates.weight"] = (4 * sizes.cells, 2 * sizes.projection)
        found[f"layers.{layer}.gates.bias"] = (4 * sizes.cells,)
        found[f"layers.{layer}.projection.weight"] = (sizes.projection, sizes.cells)
    return found | {"head.weight": (sizes.words, sizes.projection), "head.bias": (sizes.words,)}


def weights(sizes: Sizes, seed: int) -> dict[str, np.ndarray]:
    """Return float32 weights: normal, of deviation 1 / sqrt(inputs) in products, and biases of 0 (forget gates: 1)."""
    random, made = np.random.default_rng(seed), {}
    for name, shape in shapes(sizes).items():
        if name.endswith("bias"):
            made[name] = np.zeros(shape, np.float32)
        else:
            inputs = 1 if name == "embedding.weight" else shape[-1]
            made[name] = (random.standard_normal(shape) / inputs**0.5).astype(np.float32)
        if name.endswith("gates.bias"):
            made[name][sizes.cells : 2 * sizes.cells] = 1
    return made


def batches(seed: int, steps: int = STEPS) -> np.ndarray:
    """Return int32 words of shape (steps, MICRO_BATCHES, ROWS, LENGTH + 1): inputs, and targets one later."""
    rows = _rows()[TEST_ROWS:]
    chosen = data.batches_of(data.Part(rows, rows), MICRO_BATCHES * ROWS, steps, seed)
    return rows[np.reshape(chosen, (steps, MICRO_BATCHES, ROWS))]


def test_words() -> np.ndarray:
    """Return int32 words of shape (TEST_ROWS, LENGTH + 1) that are in no batch."""
    return _rows()[:TEST_ROWS]


def _rows() -> np.ndarray:
    """Return the text in rows, shuffled once."""
    text = data.words(SMALL.words)
    rows = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
    return np.random.default_rng(0).permutation(rows)
