"""Inception v2, BN-Inception (Ioffe and Szegedy, "Batch Normalization", 2015).

Published: 224 x 224 images in color, 1000 classes; 11,295,240 parameters where, as in the Caffe model, convolutions
have a bias before batch norm. Here: one eighth of the channels, and digits of 64 x 64 pixels (a multiple of 32).
"""

import functools

from torch import nn

import polyamp
from models.on_torch import vision
from models.on_torch.vision import Layer, Recipe, branches, chain, pooled, scores, train_classifier

convolution = functools.partial(vision.convolution, bias=True)

RECIPE = Recipe(size=64, steps=140, batch=48, rate=1e-2)


def inception_v2(width: float = 1.0, classes: int = 1000, channels: int = 3) -> nn.Module:
    """Return a network from images [batch, channels, height, width] to scores."""
    layers = chain(
        convolution(64, 7, stride=2), _halved(),
        convolution(64, 1), convolution(192, 3), _halved(),
        inception(64, (64, 64), (64, 96), 32),
        inception(64, (64, 96), (64, 96), 64),
        reduced((128, 160), (64, 96)),
        inception(224, (64, 96), (96, 128), 128),
        inception(192, (96, 128), (96, 128), 128),
        inception(160, (128, 160), (128, 160), 128),
        inception(96, (128, 192), (160, 192), 128),
        reduced((128, 192), (192, 256)),
        inception(352, (192, 320), (160, 224), 128),
        inception(352, (192, 320), (192, 224), 128, nn.MaxPool2d),
        pooled(1), scores(classes),
    )  # fmt: skip
    return layers(channels, width)[0]


def inception(
    one: int, three: tuple[int, int], double: tuple[int, int], pool: int, kind: type[nn.Module] = nn.AvgPool2d
) -> Layer:
    """Return the four branches of a module; two convolutions of 3 x 3 replace 5 x 5 (figure 5 of the paper)."""
    return branches(
        convolution(one, 1),
        chain(convolution(three[0], 1), convolution(three[1], 3)),
        chain(convolution(double[0], 1), convolution(double[1], 3), convolution(double[1], 3)),
        chain(kind(3, 1, padding=1), convolution(pool, 1)),
    )


def reduced(three: tuple[int, int], double: tuple[int, int]) -> Layer:
    """Return the branches of a module that halves the image."""
    return branches(
        chain(convolution(three[0], 1), convolution(three[1], 3, stride=2)),
        chain(convolution(double[0], 1), convolution(double[1], 3), convolution(double[1], 3, stride=2)),
        _halved(),
    )


def _halved() -> nn.Module:
    return nn.MaxPool2d(3, 2, ceil_mode=True)


def train(policy: polyamp.Policy, seed: int, recipe: Recipe = RECIPE) -> dict[str, float]:
    return train_classifier(lambda: inception_v2(1 / 8, 10, 1), recipe, policy, seed)
