"""The translation transformer of FAIRseq in Keras, small, from English to German.

Vaswani and others (2017), as FAIRseq's ``transformer_vaswani_wmt_en_de_big``: 209,911,808 parameters with one table of
32,768 words for source, target and scores. Here: 2 + 2 layers of 64 numbers and 4 heads, on messages of Django's
interface.
"""

from typing import Any, NamedTuple

import keras
import numpy as np
from keras import layers, ops

import polyamp
from models.data import PAD, START, Part, pairs
from models.on_keras.training import Training, adam


class Sizes(NamedTuple):
    words: int
    width: int
    layers: int
    heads: int


PUBLISHED = Sizes(words=32_768, width=1024, layers=6, heads=16)
SMALL = Sizes(words=2000, width=64, layers=2, heads=4)
LENGTH, STEPS, DROPOUT = 16, 150, 0.1


def make_model(sizes: Sizes = SMALL) -> keras.Model:
    """Return a transformer for numbers of words: source, and target without its last word; it returns logits."""
    source, target = keras.Input((LENGTH,), dtype="int32"), keras.Input((LENGTH,), dtype="int32")
    normal = keras.initializers.RandomNormal(stddev=sizes.width**-0.5)
    table = layers.ReversibleEmbedding(sizes.words, sizes.width, embeddings_initializer=normal, name="table")
    mask = ops.expand_dims(ops.not_equal(source, PAD), 1)
    memory, hidden = _placed(table(source), sizes), _placed(table(target), sizes)
    for _ in range(sizes.layers):
        memory = _added(memory, _attention(sizes)(memory, memory, attention_mask=mask))
        memory = _added(memory, _feed_forward(memory, sizes))
    for _ in range(sizes.layers):
        hidden = _added(hidden, _attention(sizes)(hidden, hidden, use_causal_mask=True))
        hidden = _added(hidden, _attention(sizes)(hidden, memory, attention_mask=mask))
        hidden = _added(hidden, _feed_forward(hidden, sizes))
    return keras.Model([source, target], table(hidden, reverse=True))


def _placed(embedded: Any, sizes: Sizes) -> Any:
    """Return embedded words with the sines and cosines of their places."""
    angles = np.arange(LENGTH)[:, None] / 10_000 ** (np.arange(sizes.width // 2) / (sizes.width // 2))
    places = np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
    return layers.Dropout(DROPOUT)(layers.Rescaling(sizes.width**0.5, places)(embedded))


def _attention(sizes: Sizes) -> layers.Layer:
    return layers.MultiHeadAttention(sizes.heads, sizes.width // sizes.heads, dropout=DROPOUT)


def _feed_forward(x: Any, sizes: Sizes) -> Any:
    return layers.Dense(sizes.width)(layers.Dense(4 * sizes.width, activation="relu")(x))


def _added(x: Any, change: Any) -> Any:
    return layers.LayerNormalization(epsilon=1e-5)(layers.Add()([x, layers.Dropout(DROPOUT)(change)]))


def token_accuracy(labels: Any, logits: Any) -> Any:
    """Return the fraction of the words, without padding, whose score is the highest."""
    counted = ops.cast(ops.not_equal(labels, PAD), "float32")
    right = ops.cast(ops.equal(ops.argmax(logits, axis=-1), ops.cast(labels, "int64")), "float32")
    return ops.sum(right * counted) / ops.sum(counted)


TRAINING = Training(
    make_model,
    adam(2e-3, STEPS),
    STEPS,
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=PAD),
    metrics=(token_accuracy,),
)


def train(policy: polyamp.Policy, seed: int) -> dict[str, float]:
    """Train on messages and return, for 200 others, how many words follow rightly the right ones, and the loss."""
    messages = pairs("de", LENGTH, SMALL.words // 2)
    return TRAINING.test(policy, seed, _joined(messages.train), _joined(messages.test))


def _joined(part: Part) -> Part:
    """Return one vocabulary for both languages, and the targets one word later as inputs."""
    source = np.where(part.x == PAD, PAD, part.x + SMALL.words // 2)
    return Part([source, np.pad(part.y[:, :-1], ((0, 0), (1, 0)), constant_values=START)], part.y)
