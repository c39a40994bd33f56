"""BERT with its classification head (Devlin et al., BERT, 2018), which tells ten languages apart.

The reduced model has 2 layers instead of 12, a width of 64 instead of 768 and no dropout, and reads 16 pieces of
words. It learns from random weights, where the table's row is fine-tuned.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

import polyamp
from models.data import PAD, START, Data, Part, sentences
from models.on_jax.layers import Attention, repeated
from models.on_jax.training import Task, adam, classify, cross_entropy


class Sizes(NamedTuple):
    words: int = 30522
    classes: int = 2
    width: int = 768
    heads: int = 12
    layers: int = 12
    positions: int = 512
    types: int = 2
    dropout: float = 0.1


class Layer(linen.Module):
    sizes: Sizes

    @linen.compact
    def __call__(self, x: jax.Array, mask: jax.Array, train: bool) -> jax.Array:
        width, dropout = x.shape[-1], linen.Dropout(self.sizes.dropout, deterministic=not train)
        found = Attention(self.sizes.heads, self.sizes.dropout)(x, x, mask, train)
        x = linen.LayerNorm(epsilon=1e-12)(x + dropout(found))
        found = linen.gelu(linen.Dense(4 * width, name="wide")(x), approximate=False)
        return linen.LayerNorm(epsilon=1e-12)(x + dropout(linen.Dense(width, name="narrow")(found)))


class BERT(linen.Module):
    sizes: Sizes = Sizes()
    deviation: float = 0.02
    """Of the first weights of the embeddings."""

    @linen.compact
    def __call__(self, words: jax.Array, train: bool) -> jax.Array:
        def embedded(numbers: jax.Array, count: int, name: str) -> jax.Array:
            normal = linen.initializers.normal(self.deviation)
            return linen.Embed(count, sizes.width, embedding_init=normal, name=name)(numbers)

        sizes = self.sizes
        dropout = linen.Dropout(sizes.dropout, deterministic=not train)
        x = embedded(words, sizes.words, "word")
        x += embedded(jnp.arange(words.shape[1]), sizes.positions, "position")
        x += embedded(jnp.zeros(1, int), sizes.types, "type")
        x = dropout(linen.LayerNorm(epsilon=1e-12)(x))
        x = repeated(Layer(sizes, name="layers"), sizes.layers, x, (words != PAD)[:, None, None], train)
        pooled = jnp.tanh(linen.Dense(sizes.width, name="pooler")(x[:, 0]))
        return linen.Dense(sizes.classes, name="classifier")(dropout(pooled))


def data() -> Data:
    """Return texts that begin with a mark ([CLS]), where BERT reads the class."""
    found = sentences(length=16)
    train, test = (Part(np.pad(part.x, ((0, 0), (1, 0)), constant_values=START), part.y) for part in found[:2])
    return found._replace(train=train, test=test)


DATA = data()
STEPS = 300
SMALL = Sizes(DATA.words, DATA.classes, width=64, heads=4, layers=2, positions=32, dropout=0.0)
TASK = Task(BERT(SMALL, deviation=0.05), cross_entropy, adam(1e-3, STEPS))


def train(policy: polyamp.Policy, seed: int) -> dict[str, float]:
    return classify(TASK, DATA, policy, seed, size=32, steps=STEPS)
