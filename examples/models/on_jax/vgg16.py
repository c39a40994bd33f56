"""VGG-16, network D of Simonyan and Zisserman (Very Deep Convolutional Networks, 2014), on handwritten digits.

All 16 layers are here; the reduced model has a sixteenth of the channels, no dropout, and images of 32 x 32.
"""

import jax
from flax import linen

import polyamp
from models.data import images
from models.on_jax.training import Task, adam, classify, cross_entropy

ORTHOGONAL = linen.initializers.orthogonal(2**0.5)
"""As PyTorch's model here: with normal weights, what one seed reaches and another does differ by 3 points."""


class VGG(linen.Module):
    width: int = 64
    classes: int = 1000
    dropout: float = 0.5

    @linen.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for times, count in ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3)):
            for _ in range(count):
                x = linen.relu(linen.Conv(times * self.width, (3, 3), padding=1, kernel_init=ORTHOGONAL)(x))
            x = linen.max_pool(x, (2, 2), (2, 2))
        x = x.reshape(len(x), -1)
        for _ in range(2):
            x = linen.relu(linen.Dense(64 * self.width, kernel_init=ORTHOGONAL)(x))
            x = linen.Dropout(self.dropout)(x, deterministic=not train)
        return linen.Dense(self.classes)(x)


STEPS = 300
TASK = Task(VGG(width=4, classes=10, dropout=0.0), cross_entropy, adam(2e-3, STEPS))


def train(policy: polyamp.Policy, seed: int) -> dict[str, float]:
    return classify(TASK, images(size=32), policy, seed, size=64, steps=STEPS)
