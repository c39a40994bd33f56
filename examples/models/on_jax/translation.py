"""Translate English to German: the words, the loss and the metrics of a translation model.

The words of both languages have one vocabulary, as in the published models: English ones first, then German ones.
"""

from typing import Any

import jax
import numpy as np
import optax

import polyamp
from models.data import PAD, START, UNKNOWN, Part, batches_of, pairs
from models.on_jax.training import Task, fit, outputs_of

DATA = pairs(most=1000)
WORDS = DATA.words + DATA.classes - UNKNOWN - 1


def batch_of(part: Part, rows: Any) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Return the inputs of some rows, which are the source and the target one word later, and the target."""
    source, target = part.x[rows], part.y[rows]
    target = np.where(target > UNKNOWN, target + DATA.words - UNKNOWN - 1, target)
    before = np.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=START)
    return (source, before), target


def loss_of(scores: jax.Array, words: jax.Array, smoothing: float = 0.1) -> jax.Array:
    """Return the mean over the words; labels are smoothed as by Vaswani et al. (2017)."""
    labels = optax.smooth_labels(jax.nn.one_hot(words, scores.shape[-1]), smoothing)
    return optax.softmax_cross_entropy(scores, labels).mean(where=words != PAD)


def translate(task: Task, policy: polyamp.Policy, seed: int, *, size: int, steps: int) -> dict[str, float]:
    """Train on batches of ``size`` pairs; return the share of right next words, and the loss of one, in test pairs."""
    batches = [batch_of(DATA.train, rows) for rows in batches_of(DATA.train, size, steps, seed)]
    variables = fit(task, batches, policy, seed)
    inputs, words = batch_of(DATA.test, slice(None))
    scores = outputs_of(task, policy, variables, inputs)
    right = (scores.argmax(-1) == words)[words != PAD]
    return {"token_accuracy": float(right.mean()), "loss": float(loss_of(scores, words, smoothing=0.0))}
