"""ResNet-50 (He et al., Deep Residual Learning for Image Recognition, 2015), on handwritten digits.

All 50 layers are here; the reduced model has an eighth of the channels, and images of 32 x 32. The last norm of each
block begins with a scale of 0 (Goyal et al., 2017), so that the deep network learns from its first step on.
"""

import jax
from flax import linen

import polyamp
from models.data import images
from models.on_jax.layers import ConvNorm
from models.on_jax.training import Task, adam, classify, cross_entropy


class Bottleneck(linen.Module):
    width: int
    stride: int = 1

    @linen.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        out = ConvNorm(self.width)(x, train)
        out = ConvNorm(self.width, (3, 3), self.stride)(out, train)
        out = ConvNorm(4 * self.width, relu=False, scale=linen.initializers.zeros)(out, train)
        if x.shape != out.shape:
            x = ConvNorm(4 * self.width, stride=self.stride, relu=False)(x, train)
        return linen.relu(x + out)


class ResNet(linen.Module):
    width: int = 64
    classes: int = 1000
    blocks: tuple[int, ...] = (3, 4, 6, 3)

    @linen.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = ConvNorm(self.width, (7, 7), stride=2)(x, train)
        x = linen.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
        for stage, count in enumerate(self.blocks):
            for block in range(count):
                x = Bottleneck(self.width * 2**stage, stride=2 if stage and not block else 1)(x, train)
        return linen.Dense(self.classes)(x.mean((1, 2)))


STEPS = 200
TASK = Task(ResNet(width=8, classes=10), cross_entropy, adam(0.01, STEPS))


def train(policy: polyamp.Policy, seed: int) -> dict[str, float]:
    return classify(TASK, images(size=32), policy, seed, size=64, steps=STEPS)
