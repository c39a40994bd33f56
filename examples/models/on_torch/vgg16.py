"""VGG-16: configuration D of Simonyan and Zisserman, "Very Deep Convolutional Networks" (2014).

Published: 224 x 224 images in color, 1000 classes, 138,357,544 parameters. Here: one sixteenth of the channels, and
digits of 32 x 32 pixels.
"""

from torch import nn

import polyamp
from models.on_torch.vision import Layer, Recipe, chain, convolution, linear, pooled, scores, train_classifier

STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""Channels of each stage, and its number of convolutions."""

RECIPE = Recipe(size=32, steps=300, batch=64, rate=2e-3)


def vgg16(width: float = 1.0, classes: int = 1000, channels: int = 3, dropout: float = 0.5) -> nn.Module:
    """Return a network from images [batch, channels, height, width], at least 32 x 32 pixels, to scores."""
    layers = chain(
        *(_stage(filters, depth) for filters, depth in STAGES),
        pooled(7), linear(4096), nn.Dropout(dropout), linear(4096), nn.Dropout(dropout), scores(classes),
    )  # fmt: skip
    return layers(channels, width)[0]


def _stage(filters: int, depth: int) -> Layer:
    return chain(*[convolution(filters, 3, norm=False, bias=True)] * depth, nn.MaxPool2d(2))


def train(policy: polyamp.Policy, seed: int, recipe: Recipe = RECIPE) -> dict[str, float]:
    return train_classifier(lambda: vgg16(1 / 16, 10, 1, dropout=0.0), recipe, policy, seed)
