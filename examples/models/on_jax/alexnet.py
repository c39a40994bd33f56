"""AlexNet in one column (Krizhevsky, One Weird Trick for Parallelizing Convolutional Networks, 2014), on digits.

All layers are here; the reduced model has an eighth of the channels, a dropout of 0.1, and images of 64 x 64.
"""

import jax
from flax import linen

import polyamp
from models.data import images
from models.on_jax.training import Task, adam, classify, cross_entropy

HE = linen.initializers.he_normal()


class AlexNet(linen.Module):
    width: int = 64
    classes: int = 1000
    dropout: float = 0.5

    @linen.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = linen.relu(linen.Conv(self.width, (11, 11), 4, 2, kernel_init=HE)(x))
        x = linen.max_pool(x, (3, 3), (2, 2))
        x = linen.relu(linen.Conv(3 * self.width, (5, 5), padding=2, kernel_init=HE)(x))
        x = linen.max_pool(x, (3, 3), (2, 2))
        for times in (6, 4, 4):
            x = linen.relu(linen.Conv(times * self.width, (3, 3), padding=1, kernel_init=HE)(x))
        x = linen.max_pool(x, (3, 3), (2, 2))
        x = x.reshape(len(x), -1)
        for _ in range(2):
            x = linen.Dropout(self.dropout)(x, deterministic=not train)
            x = linen.relu(linen.Dense(64 * self.width, kernel_init=HE)(x))
        return linen.Dense(self.classes)(x)


STEPS = 250
TASK = Task(AlexNet(width=8, classes=10, dropout=0.1), cross_entropy, adam(1e-3, STEPS))


def train(policy: polyamp.Policy, seed: int) -> dict[str, float]:
    return classify(TASK, images(size=64), policy, seed, size=64, steps=STEPS)
