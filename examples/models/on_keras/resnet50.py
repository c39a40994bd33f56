"""ResNet-50 of ``keras.applications``, thinned, on handwritten digits.

He, Zhang, Ren and Sun (2015). Keras' network has 25,636,712 numbers for images of 224 x 224 and 1,000 classes: the
usual 25,557,032, a bias in each of its 53 convolutions, and the statistics of its norms. Here: every layer 1/16 as
wide, images of 32 x 32 and 10 classes.
"""

from functools import partial

import keras

import polyamp
from models.data import images
from models.on_keras.training import Training, adam, thinned

SIZE, STEPS = 32, 200


def make_model(width: float = 1 / 16, size: int = SIZE, channels: int = 1, classes: int = 10) -> keras.Model:
    """Return ResNet-50 for images of shape (size, size, channels); it returns logits.

    Every block starts as the identity: the last norm of each has scale 0 (Goyal et al., 2017).
    """
    whole = partial(keras.applications.ResNet50, weights=None, input_shape=(size, size, channels), classes=classes)
    quick = {"momentum": 0.9}  # Keras' statistics, of 0.99, need thousands of steps
    model = thinned(partial(whole, classifier_activation=None), width, **quick)
    for layer in model.layers:
        if layer.name.endswith("_3_bn"):
            layer.gamma.assign(keras.ops.zeros(layer.gamma.shape))
    return model


TRAINING = Training(make_model, adam(1e-2, STEPS), STEPS, batch=64)


def train(policy: polyamp.Policy, seed: int) -> dict[str, float]:
    """Train on 2,500 digits and return the accuracy and the loss on 2,500 others."""
    digits = images(SIZE)
    return TRAINING.test(policy, seed, digits.train, digits.test)
