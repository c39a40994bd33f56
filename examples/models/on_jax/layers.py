"""The layers that several models of this folder have."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen


class ConvNorm(linen.Module):
    """A convolution without bias, a batch norm, and a ReLU unless ``relu`` is false."""

    features: int
    kernel: tuple[int, int] = (1, 1)
    stride: int = 1
    relu: bool = True
    epsilon: float = 1e-5
    scale: Callable[..., Any] = linen.initializers.ones
    """Makes the first scale of the norm."""

    @linen.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        padding = [(size // 2, size // 2) for size in self.kernel]
        x = linen.Conv(self.features, self.kernel, self.stride, padding, use_bias=False)(x)
        x = linen.BatchNorm(not train, momentum=0.9, epsilon=self.epsilon, scale_init=self.scale)(x)
        return linen.relu(x) if self.relu else x


class Attention(linen.Module):
    """Attention of several heads, with biases in its four products, as in BERT."""

    heads: int
    dropout: float

    @linen.compact
    def __call__(self, x: jax.Array, memory: jax.Array, mask: jax.Array, train: bool) -> jax.Array:
        """Attend from x to memory wherever the mask, which broadcasts to (batch, heads, queries, keys), is true."""
        width = x.shape[-1]
        query, key, value = (
            linen.Dense(width, name=name)(y).reshape(*y.shape[:2], self.heads, width // self.heads)
            for name, y in (("query", x), ("key", memory), ("value", memory))
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / (width // self.heads) ** 0.5
        shares = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
        shares = linen.Dropout(self.dropout)(shares, deterministic=not train)
        found = jnp.einsum("bhqk,bkhd->bqhd", shares, value)
        return linen.Dense(width, name="output")(found.reshape(x.shape))


def repeated(block: linen.Module, count: int, x: jax.Array, *others: Any) -> jax.Array:
    """Return x after ``count`` blocks of one shape, each with its own weights: one loop, whose body is compiled once.

    ``others`` are further arguments, the same for every block.
    """
    loop = linen.scan(
        lambda block, x, _: (block(x, *others), None),
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        length=count,
    )
    return loop(block, x, None)[0]
