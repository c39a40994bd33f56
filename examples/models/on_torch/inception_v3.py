"""Inception v3 (Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2015).

Published: 299 x 299 images in color, 1000 classes; with the auxiliary classifier 27,161,264 parameters, as in
torchvision. Here: one eighth of the channels, and digits of 75 x 75 pixels, at which the auxiliary classifier must
pool to 5 x 5 pixels whatever it receives.
"""

import functools

from torch import nn

import polyamp
from models.on_torch import vision
from models.on_torch.vision import Layer, Recipe, Supervised, branches, chain, pooled, scores, train_classifier

convolution = functools.partial(vision.convolution, eps=1e-3)

RECIPE = Recipe(size=75, steps=150, batch=48, rate=5e-3)


def inception_v3(width: float = 1.0, classes: int = 1000, channels: int = 3, dropout: float = 0.5) -> nn.Module:
    """Return a network from images [batch, channels, height, width], at least 75 x 75 pixels, to scores."""
    start = chain(
        convolution(32, 3, stride=2, padding=0), convolution(32, 3, padding=0), convolution(64, 3), nn.MaxPool2d(3, 2),
        convolution(80, 1), convolution(192, 3, padding=0), nn.MaxPool2d(3, 2),
        large(32), large(64), large(64), reduced(),
        factored(128), factored(160), factored(160), factored(192),
    )  # fmt: skip
    auxiliary = chain(nn.AdaptiveAvgPool2d(5), convolution(128, 1), convolution(768, 5, padding=0), pooled(1))
    end = chain(reduced_again(), expanded(), expanded())
    heads = [chain(auxiliary, scores(classes)), chain(pooled(1), nn.Dropout(dropout), scores(classes))]
    return Supervised([start, end], heads, channels, width)


def large(pool: int) -> Layer:
    """Return the branches of figure 5, for the largest images."""
    return branches(
        convolution(64, 1),
        chain(convolution(48, 1), convolution(64, 5)),
        chain(convolution(64, 1), convolution(96, 3), convolution(96, 3)),
        _averaged(pool),
    )


def factored(inside: int) -> Layer:
    """Return the branches of figure 6, in which 1 x 7 and 7 x 1 replace 7 x 7."""
    row, column = (1, 7), (7, 1)
    twice = [convolution(inside, kernel) for kernel in (column, row, column)]
    return branches(
        convolution(192, 1),
        chain(convolution(inside, 1), convolution(inside, row), convolution(192, column)),
        chain(convolution(inside, 1), *twice, convolution(192, row)),
        _averaged(192),
    )


def expanded() -> Layer:
    """Return the branches of figure 7, for the smallest images."""
    split = branches(convolution(384, (1, 3)), convolution(384, (3, 1)))
    return branches(
        convolution(320, 1),
        chain(convolution(384, 1), split),
        chain(convolution(448, 1), convolution(384, 3), split),
        _averaged(192),
    )


def reduced() -> Layer:
    """Return the branches that halve 35 x 35 pixels (figure 10)."""
    return branches(
        _halved(384),
        chain(convolution(64, 1), convolution(96, 3), _halved(96)),
        nn.MaxPool2d(3, 2),
    )


def reduced_again() -> Layer:
    """Return the branches that halve 17 x 17 pixels."""
    return branches(
        chain(convolution(192, 1), _halved(320)),
        chain(convolution(192, 1), convolution(192, (1, 7)), convolution(192, (7, 1)), _halved(192)),
        nn.MaxPool2d(3, 2),
    )


def _averaged(filters: int) -> Layer:
    return chain(nn.AvgPool2d(3, 1, padding=1), convolution(filters, 1))


def _halved(filters: int) -> Layer:
    return convolution(filters, 3, stride=2, padding=0)


def train(policy: polyamp.Policy, seed: int, recipe: Recipe = RECIPE) -> dict[str, float]:
    return train_classifier(lambda: inception_v3(1 / 8, 10, 1, dropout=0.1), recipe, policy, seed)
