"""ResNet-50 (He et al., "Deep Residual Learning", CVPR 2016), version 1.5: the 3 x 3 convolution has the stride.

Published: 224 x 224 images in color, 1000 classes, 25,557,032 parameters. Here: one eighth of the channels, and digits
of 32 x 32 pixels.
"""

from torch import Tensor, nn

import polyamp
from models.on_torch.vision import Layer, Recipe, chain, convolution, pooled, scores, train_classifier

RECIPE = Recipe(size=32, steps=200, batch=64, rate=1e-2)


def resnet50(
    width: float = 1.0, classes: int = 1000, channels: int = 3, depths: tuple[int, ...] = (3, 4, 6, 3)
) -> nn.Module:
    """Return a network from images [batch, channels, height, width] to scores: 161 tensors of parameters."""
    blocks = [
        bottleneck(64 << stage, stride=2 if stage and not place else 1)
        for stage, depth in enumerate(depths)
        for place in range(depth)
    ]
    stem = chain(convolution(64, 7, stride=2), nn.MaxPool2d(3, 2, padding=1))
    return chain(stem, *blocks, pooled(1), scores(classes))(channels, width)[0]


class Residual(nn.Module):
    """ReLU of the sum of a body and a shortcut."""

    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body, self.shortcut = body, shortcut

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) + self.shortcut(x)).relu_()


def bottleneck(filters: int, stride: int) -> Layer:
    """Return 1x1, 3x3 and 1x1 convolutions with a shortcut (figure 5 of the paper)."""
    body = chain(convolution(filters, 1), convolution(filters, 3, stride), convolution(4 * filters, 1, relu=False))
    projection = convolution(4 * filters, 1, stride, relu=False)

    def layer(channels: int, width: float) -> tuple[nn.Module, int]:
        module, out = body(channels, width)
        nn.init.zeros_(module[-1][-1].weight)  # the block starts as its shortcut (Goyal et al., 2017)
        same = stride == 1 and channels == out
        return Residual(module, nn.Identity() if same else projection(channels, width)[0]), out

    return layer


def train(policy: polyamp.Policy, seed: int, recipe: Recipe = RECIPE) -> dict[str, float]:
    return train_classifier(lambda: resnet50(1 / 8, 10, 1), recipe, policy, seed)
