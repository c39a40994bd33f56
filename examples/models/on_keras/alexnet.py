"""AlexNet in Keras, thinned, on handwritten digits.

Krizhevsky, Sutskever and Hinton (2012), in the form for one device of Krizhevsky (2014): 61,100,840 parameters for
images of 224 x 224 and 1,000 classes. Here: every layer an eighth as wide, a dropout of 0.1, images of 64 x 64 and 10
classes.
"""

import keras
from keras import layers

import polyamp
from models.data import images
from models.on_keras.training import Training, adam, thinned

SIZE, STEPS, DROPOUT = 64, 250, 0.1


def make_model(width: float = 1 / 8, size: int = SIZE, channels: int = 1, classes: int = 10) -> keras.Model:
    """Return AlexNet for images of shape (size, size, channels); it returns logits."""
    relu = {"activation": "relu"}
    whole = lambda: keras.Sequential([  # noqa: E731
        keras.Input((size, size, channels)),
        layers.ZeroPadding2D(2), layers.Conv2D(64, 11, strides=4, **relu), layers.MaxPooling2D(3, 2),
        layers.Conv2D(192, 5, padding="same", **relu), layers.MaxPooling2D(3, 2),
        layers.Conv2D(384, 3, padding="same", **relu),
        layers.Conv2D(256, 3, padding="same", **relu),
        layers.Conv2D(256, 3, padding="same", **relu), layers.MaxPooling2D(3, 2),
        layers.Flatten(),
        layers.Dropout(DROPOUT), layers.Dense(4096, **relu),
        layers.Dropout(DROPOUT), layers.Dense(4096, **relu),
        layers.Dense(classes),
    ])  # fmt: skip
    return thinned(whole, width, kernel_initializer="he_normal")


TRAINING = Training(make_model, adam(1e-3, STEPS), STEPS, batch=64)


def train(policy: polyamp.Policy, seed: int) -> dict[str, float]:
    """Train on 2,500 digits and return the accuracy and the loss on 2,500 others."""
    digits = images(SIZE)
    return TRAINING.test(policy, seed, digits.train, digits.test)
