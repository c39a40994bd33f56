"""GNMT (Wu et al., Google's Neural Machine Translation System, 2016), as NVIDIA's examples train it, English to German.

All layers are here: four LSTMs of the encoder, the first in both directions, and four of the decoder. The first one of
those attends to the source (Bahdanau et al., 2015), and the others read what it found. From the third layer on, a
layer's input is added to its output. The reduced model has a width of 64 instead of 1,024, and learns sentences of
Django. The commonest word is 0.23 of the words.
"""

import jax
import jax.numpy as jnp
from flax import linen

import polyamp
from models.data import PAD
from models.on_jax.training import Task, adam
from models.on_jax.translation import WORDS, loss_of, translate


class LSTM(linen.Module):
    """A layer of LSTM cells over (batch, time, numbers), with the two biases of cuDNN."""

    width: int
    reverse: bool = False

    @linen.compact
    def __call__(self, x: jax.Array, seen: jax.Array) -> jax.Array:
        """Return the states at every time. They stay zero while nothing was ``seen``: before a reversed sentence."""
        inputs = linen.Dense(4 * self.width, name="input")(x)
        weight = self.param("weight", linen.initializers.orthogonal(), (self.width, 4 * self.width))
        bias = self.param("bias", linen.initializers.zeros, (4 * self.width,))

        def next_state(state: tuple[jax.Array, jax.Array], now: tuple[jax.Array, jax.Array]) -> tuple:
            (hidden, cell), (inputs, seen) = state, now
            taken, kept, shown, new = jnp.split(inputs + hidden @ weight + bias, 4, -1)
            cell = jax.nn.sigmoid(kept) * cell + jax.nn.sigmoid(taken) * jnp.tanh(new)
            cell = jnp.where(seen[:, None], cell, 0)
            hidden = jax.nn.sigmoid(shown) * jnp.tanh(cell)
            return (hidden, cell), hidden

        zeros = jnp.zeros((len(x), self.width))
        _, states = jax.lax.scan(next_state, (zeros, zeros), (inputs.swapaxes(0, 1), seen.T), reverse=self.reverse)
        return states.swapaxes(0, 1)


class Attention(linen.Module):
    """Attention that adds query and key: the scores are v . tanh(q + k + b), where v has a learned length."""

    @linen.compact
    def __call__(self, x: jax.Array, memory: jax.Array, seen: jax.Array) -> jax.Array:
        width = x.shape[-1]
        query = linen.Dense(width, use_bias=False, name="query")(x)
        key = linen.Dense(width, use_bias=False, name="key")(memory)
        direction = self.param("direction", linen.initializers.normal(0.1), (width,))
        length = self.param("length", linen.initializers.constant(width**-0.5), ())
        bias = self.param("bias", linen.initializers.zeros, (width,))
        vector = length * direction / jnp.linalg.norm(direction)
        scores = jnp.tanh(query[:, :, None] + key[:, None] + bias) @ vector
        return jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf)) @ memory


class GNMT(linen.Module):
    words: int = 31794
    width: int = 1024
    layers: int = 4
    dropout: float = 0.2

    @linen.compact
    def __call__(self, source: jax.Array, target: jax.Array, train: bool) -> jax.Array:
        """Return the scores of each next word of the target, which begins with `START`."""
        words = linen.Embed(self.words, self.width, embedding_init=linen.initializers.normal(0.1))
        dropout = linen.Dropout(self.dropout, deterministic=not train)
        seen, always = source != PAD, jnp.ones(target.shape, bool)

        x = dropout(words(source))
        both = [LSTM(self.width, reverse, name=f"encoder_0_{reverse}")(x, seen) for reverse in (False, True)]
        x = LSTM(self.width, name="encoder_1")(dropout(jnp.concatenate(both, -1)), seen)
        for layer in range(2, self.layers):
            x = x + LSTM(self.width, name=f"encoder_{layer}")(dropout(x), seen)
        memory = x

        x = LSTM(self.width, name="decoder_0")(dropout(words(target)), always)
        found = Attention(name="attention")(x, memory, seen)
        for layer in range(1, self.layers):
            inputs = jnp.concatenate([dropout(x), found], -1)
            new = LSTM(self.width, name=f"decoder_{layer}")(inputs, always)
            x = x + new if layer > 1 else new
        return linen.Dense(self.words, name="head")(x)


STEPS = 250
TASK = Task(GNMT(WORDS, width=64), loss_of, adam(5e-3, STEPS))


def train(policy: polyamp.Policy, seed: int) -> dict[str, float]:
    return translate(TASK, policy, seed, size=32, steps=STEPS)
