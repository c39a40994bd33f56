"""Models for the GPU benchmarks: our own ResNet-50 v1.5, and lists of parameters' shapes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, ...]


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with a shortcut (He et al., "Deep Residual Learning", CVPR 2016, figure 5)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_convolution(channels, width, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(width, 4 * width, 1),
        )
        same = stride == 1 and channels == 4 * width
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(channels, 4 * width, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def _convolution(channels: int, width: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(width)


def resnet50(width: int = 64, classes: int = 1000, depths: tuple[int, ...] = (3, 4, 6, 3)) -> nn.Sequential:
    """Return a network from images [batch, 3, height, width] to scores: 161 parameters, 25.6 M numbers."""
    layers: list[nn.Module] = [*_convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    channels = width
    for stage, depth in enumerate(depths):
        for place in range(depth):
            layers.append(Bottleneck(channels, width << stage, stride=2 if stage and not place else 1))
            channels = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class Classifier(nn.Module):
    """A network for images, with its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.network(images), labels)


def resnet50_shapes() -> list[Shape]:
    with torch.device("meta"):
        return [tuple(param.shape) for param in resnet50().parameters()]


def gpt2_shapes() -> list[Shape]:
    """Return the shapes of GPT-2 small with its two embeddings: 148 parameters, 124 M numbers."""
    width = 768
    norm: list[Shape] = [(width,), (width,)]
    attention: list[Shape] = [(width, 3 * width), (3 * width,), (width, width), (width,)]
    wide: list[Shape] = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(50257, width), (1024, width), *(12 * [*norm, *attention, *norm, *wide]), *norm]


def llama_shapes() -> list[Shape]:
    """Return the shapes of a Llama with 22 layers of 2048 (TinyLlama): 201 parameters, 1.1 G numbers."""
    width, keys, wide = 2048, 256, 5632
    attention: list[Shape] = [(width, width), (keys, width), (keys, width), (width, width)]
    layer: list[Shape] = [*attention, (wide, width), (wide, width), (width, wide), (width,), (width,)]
    return [(32000, width), *(22 * layer), (width,), (32000, width)]


def small_shapes() -> list[Shape]:
    return [(64, 96), (96,), (96, 33), (33,), (1,)]


PARAMETER_SETS: dict[str, Callable[[], list[Shape]]] = {
    "GPT-2 124 M": gpt2_shapes,
    "Llama 1.1 B": llama_shapes,
    "ResNet-50": resnet50_shapes,
}


def numbers(shapes: list[Shape]) -> int:
    return sum(map(math.prod, shapes))
