"""VGG-16 of ``keras.applications``, thinned, on handwritten digits.

Simonyan and Zisserman (2014), configuration D: 138,357,544 parameters for images of 224 x 224 and 1,000 classes. Here:
every layer 1/16 as wide, images of 32 x 32 and 10 classes.
"""

from functools import partial

import keras

import polyamp
from models.data import images
from models.on_keras.training import Training, adam, thinned

SIZE, STEPS = 32, 300


def make_model(width: float = 1 / 16, size: int = SIZE, channels: int = 1, classes: int = 10) -> keras.Model:
    """Return VGG-16 for images of shape (size, size, channels); it returns logits."""
    whole = partial(keras.applications.VGG16, weights=None, input_shape=(size, size, channels), classes=classes)
    return thinned(partial(whole, classifier_activation=None), width, kernel_initializer="he_normal")


TRAINING = Training(make_model, adam(2e-3, STEPS), STEPS)


def train(policy: polyamp.Policy, seed: int) -> dict[str, float]:
    """Train on 2,500 digits and return the accuracy and the loss on 2,500 others."""
    digits = images(SIZE)
    return TRAINING.test(policy, seed, digits.train, digits.test)
