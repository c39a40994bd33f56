"""BERT in Keras, small, on sentences in ten languages; `polyamp.rewrite` changes the graph of its whole step.

Devlin, Chang, Lee and Toutanova (2018): the base model has 109,482,240 parameters in front of the head. Here: 2 layers
of 64 numbers and 4 heads, texts of 16 pieces of words, no dropout, and no pretraining; a head on the first
piece finds which of ten languages a text of Django's interface is in. It runs on Keras' TensorFlow backend.
"""

from typing import Any, NamedTuple

import keras
from keras import layers, ops

import polyamp
from models.data import PAD, sentences
from models.on_keras.training import Training, adam


class Sizes(NamedTuple):
    words: int
    length: int
    width: int
    layers: int
    heads: int


LENGTH, STEPS = 16, 300
PUBLISHED = Sizes(words=30_522, length=512, width=768, layers=12, heads=12)
SMALL = Sizes(words=sentences(LENGTH).words, length=LENGTH, width=64, layers=2, heads=4)
NORMAL = {"embeddings_initializer": keras.initializers.TruncatedNormal(stddev=0.05)}
DROPOUT = 0.0


def make_model(sizes: Sizes = SMALL, classes: int = 10) -> keras.Model:
    """Return BERT for numbers of words of shape (batch, length); it returns the logits of the classes."""
    words = keras.Input((sizes.length,), dtype="int32")
    mask = ops.expand_dims(ops.not_equal(words, PAD), 1)
    hidden = _embedded(words, sizes)
    for _ in range(sizes.layers):
        hidden = _layer(hidden, mask, sizes)
    pooled = layers.Dense(sizes.width, activation="tanh", name="pooler")(hidden[:, 0])
    return keras.Model(words, layers.Dense(classes, name="head")(layers.Dropout(DROPOUT)(pooled)))


def _embedded(words: Any, sizes: Sizes) -> Any:
    kinds = ops.zeros_like(words)
    places = kinds + ops.arange(sizes.length, dtype="int32")
    inputs = ((words, sizes.words, "words"), (places, sizes.length, "places"), (kinds, 2, "kinds"))
    parts = [layers.Embedding(count, sizes.width, name=name, **NORMAL)(numbers) for numbers, count, name in inputs]
    return layers.Dropout(DROPOUT)(_norm()(layers.Add()(parts)))


def _layer(hidden: Any, mask: Any, sizes: Sizes) -> Any:
    attention = layers.MultiHeadAttention(sizes.heads, sizes.width // sizes.heads, dropout=DROPOUT)
    attended = layers.Dropout(DROPOUT)(attention(hidden, hidden, attention_mask=mask))
    hidden = _norm()(layers.Add()([hidden, attended]))
    wide = layers.Dense(4 * sizes.width, activation="gelu")(hidden)
    narrow = layers.Dropout(DROPOUT)(layers.Dense(sizes.width)(wide))
    return _norm()(layers.Add()([hidden, narrow]))


def _norm() -> layers.Layer:
    return layers.LayerNormalization(epsilon=1e-12)


TRAINING = Training(make_model, adam(1e-3, STEPS), STEPS, by_rewrite=True)


def train(policy: polyamp.Policy, seed: int) -> dict[str, float]:
    """Train on texts in ten languages and return the accuracy and the loss on 1,000 others."""
    texts = sentences(LENGTH)
    return TRAINING.test(policy, seed, texts.train, texts.test)
