"""GoogLeNet, Inception v1 (Szegedy et al., "Going Deeper with Convolutions", 2014), with its two auxiliary classifiers.

Published: 224 x 224 images in color, 1000 classes. As in torchvision, batch norm follows each convolution and the
branch of 5 x 5 has 3 x 3: 13,004,888 parameters, 6,624,904 of them used after training. Here: one eighth of the
channels, and digits of 64 x 64 pixels.
"""

import functools

from torch import nn

import polyamp
from models.on_torch import vision
from models.on_torch.vision import Layer, Recipe, Supervised, branches, chain, linear, pooled, scores, train_classifier

convolution = functools.partial(vision.convolution, eps=1e-3)

RECIPE = Recipe(size=64, steps=160, batch=48, rate=1e-2)


def googlenet(width: float = 1.0, classes: int = 1000, channels: int = 3) -> nn.Module:
    """Return a network from images [batch, channels, height, width], at least 15 x 15 pixels, to scores."""
    start = chain(
        convolution(64, 7, stride=2), _halved(3),
        convolution(64, 1), convolution(192, 3), _halved(3),
        inception(64, (96, 128), (16, 32), 32),
        inception(128, (128, 192), (32, 96), 64), _halved(3),
        inception(192, (96, 208), (16, 48), 64),
    )  # fmt: skip
    middle = chain(
        inception(160, (112, 224), (24, 64), 64),
        inception(128, (128, 256), (24, 64), 64),
        inception(112, (144, 288), (32, 64), 64),
    )
    end = chain(
        inception(256, (160, 320), (32, 128), 128), _halved(2),
        inception(256, (160, 320), (32, 128), 128),
        inception(384, (192, 384), (48, 128), 128),
    )  # fmt: skip
    head = chain(pooled(1), nn.Dropout(0.2), scores(classes))
    return Supervised([start, middle, end], [_auxiliary(classes), _auxiliary(classes), head], channels, width)


def inception(one: int, three: tuple[int, int], five: tuple[int, int], pool: int) -> Layer:
    """Return the four branches of figure 2(b), by the numbers of table 1."""
    return branches(
        convolution(one, 1),
        chain(convolution(three[0], 1), convolution(three[1], 3)),
        chain(convolution(five[0], 1), convolution(five[1], 3)),
        chain(nn.MaxPool2d(3, 1, padding=1), convolution(pool, 1)),
    )


def _halved(kernel: int) -> nn.Module:
    return nn.MaxPool2d(kernel, 2, ceil_mode=True)


def _auxiliary(classes: int) -> Layer:
    pool = nn.AdaptiveAvgPool2d(4)
    return chain(pool, convolution(128, 1), pooled(4), linear(1024), nn.Dropout(0.7), scores(classes))


def train(policy: polyamp.Policy, seed: int, recipe: Recipe = RECIPE) -> dict[str, float]:
    return train_classifier(lambda: googlenet(1 / 8, 10, 1), recipe, policy, seed)
