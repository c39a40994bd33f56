"""GoogLeNet (Szegedy et al., Going Deeper with Convolutions, 2014), on handwritten digits.

As in torchvision and TensorFlow's models, each convolution has a batch norm, and those of 5 x 5 are 3 x 3. All layers
are here, and both auxiliary heads; the reduced model has an eighth of the channels, and images of 64 x 64.
"""

import jax
import jax.numpy as jnp
from flax import linen

import polyamp
from models.data import images
from models.on_jax.layers import ConvNorm
from models.on_jax.training import Task, adam, classify, cross_entropy

EPSILON = 1e-3

CHANNELS = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
"""Channels of each block: 1 x 1; before 3 x 3, and 3 x 3; before 5 x 5, and 5 x 5; after the pool."""
POOLS = {"3b": 3, "4e": 2}
"""The window of the pool after a block."""
HEADS = ("4a", "4d")
"""The blocks with an auxiliary head."""


class Inception(linen.Module):
    channels: tuple[int, ...]

    @linen.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        one, before_three, three, before_five, five, after_pool = self.channels
        branches = [
            [ConvNorm(one, epsilon=EPSILON)],
            [ConvNorm(before_three, epsilon=EPSILON), ConvNorm(three, (3, 3), epsilon=EPSILON)],
            [ConvNorm(before_five, epsilon=EPSILON), ConvNorm(five, (3, 3), epsilon=EPSILON)],
            [ConvNorm(after_pool, epsilon=EPSILON)],
        ]
        inputs = [x, x, x, linen.max_pool(x, (3, 3), (1, 1), "SAME")]
        for number, layers in enumerate(branches):
            for layer in layers:
                inputs[number] = layer(inputs[number], train)
        return jnp.concatenate(inputs, -1)


class Head(linen.Module):
    """An auxiliary head on 4 x 4 means: of windows of 5 x 5 if there are 14 x 14, as in the paper."""

    width: int
    classes: int

    @linen.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        stride = x.shape[1] // 4
        window = x.shape[1] - 3 * stride
        x = linen.avg_pool(x, (window, window), (stride, stride))
        x = ConvNorm(2 * self.width, epsilon=EPSILON)(x, train).reshape(len(x), -1)
        x = linen.relu(linen.Dense(16 * self.width)(x))
        x = linen.Dropout(0.7)(x, deterministic=not train)
        return linen.Dense(self.classes)(x)


class GoogLeNet(linen.Module):
    width: int = 64
    classes: int = 1000

    @linen.compact
    def __call__(self, x: jax.Array, train: bool) -> tuple[jax.Array, ...]:
        """Return the scores of the last head and of the two auxiliary ones."""
        x = ConvNorm(self.width, (7, 7), 2, epsilon=EPSILON)(x, train)
        x = _pool(x, 3)
        x = ConvNorm(self.width, epsilon=EPSILON)(x, train)
        x = ConvNorm(3 * self.width, (3, 3), epsilon=EPSILON)(x, train)
        x, scores = _pool(x, 3), []
        for name, channels in CHANNELS.items():
            x = Inception(tuple(count * self.width // 64 for count in channels), name=f"inception_{name}")(x, train)
            if name in HEADS:
                scores.append(Head(self.width, self.classes, name=f"head_{name}")(x, train))
            if name in POOLS:
                x = _pool(x, POOLS[name])
        x = linen.Dropout(0.2)(x.mean((1, 2)), deterministic=not train)
        return (linen.Dense(self.classes)(x), *scores)


def _pool(x: jax.Array, window: int) -> jax.Array:
    """Return maxima of every second window; the last window of an odd number is cut."""
    end = (0, window - 2)
    return linen.max_pool(x, (window, window), (2, 2), (end, end))


def loss_of(scores: tuple[jax.Array, ...], labels: jax.Array) -> jax.Array:
    last, *others = (cross_entropy(each, labels) for each in scores)
    return last + 0.3 * sum(others)


STEPS = 160
TASK = Task(GoogLeNet(width=8, classes=10), loss_of, adam(0.01, STEPS))


def train(policy: polyamp.Policy, seed: int) -> dict[str, float]:
    return classify(TASK, images(size=64), policy, seed, size=48, steps=STEPS, scores_of=lambda scores: scores[0])
