"""AlexNet (Krizhevsky, Sutskever and Hinton, 2012) in the form with one column (Krizhevsky, 2014), as in torchvision.

Published: 227 x 227 images in color, 1000 classes, 61,100,840 parameters. Here: one eighth of the channels, and digits
of 64 x 64 pixels.
"""

from torch import nn

import polyamp
from models.on_torch.vision import Recipe, chain, convolution, linear, pooled, scores, train_classifier

RECIPE = Recipe(size=64, steps=250, batch=64, rate=1e-3)


def alexnet(width: float = 1.0, classes: int = 1000, channels: int = 3, dropout: float = 0.5) -> nn.Module:
    """Return a network from images [batch, channels, height, width], at least 63 x 63 pixels, to scores."""
    plain = {"norm": False, "bias": True}
    layers = chain(
        convolution(64, 11, stride=4, padding=2, **plain), nn.MaxPool2d(3, 2),
        convolution(192, 5, **plain), nn.MaxPool2d(3, 2),
        convolution(384, 3, **plain), convolution(256, 3, **plain), convolution(256, 3, **plain), nn.MaxPool2d(3, 2),
        pooled(6), nn.Dropout(dropout), linear(4096), nn.Dropout(dropout), linear(4096), scores(classes),
    )  # fmt: skip
    return layers(channels, width)[0]


def train(policy: polyamp.Policy, seed: int, recipe: Recipe = RECIPE) -> dict[str, float]:
    return train_classifier(lambda: alexnet(1 / 8, 10, 1, dropout=0.1), recipe, policy, seed)
