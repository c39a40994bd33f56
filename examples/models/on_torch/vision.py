"""What the models of images share: the parts that they are made of, their data and their training.

A layer here is a function of the number of channels that it receives and of the width; it makes a module and returns it
with the number of channels that leave it. So a model is a table of its published numbers, at any width:

>>> block = branches(convolution(64, 1), chain(nn.MaxPool2d(3, 1, padding=1), convolution(32, 1)))
>>> module, channels = block(192, 0.5)
>>> channels, module(torch.zeros(2, 192, 8, 8)).shape
(48, torch.Size([2, 48, 8, 8]))
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR

import polyamp
from models.data import images
from models.on_torch.training import batches, evaluate, fit, seeded

Layer = Callable[[int, float], tuple[nn.Module, int]]
Pair = int | tuple[int, int]


def convolution(
    filters: int,
    kernel: Pair,
    stride: int = 1,
    padding: Pair | None = None,
    *,
    norm: bool = True,
    bias: bool = False,
    relu: bool = True,
    eps: float = 1e-5,
) -> Layer:
    """Return a convolution, with batch norm and ReLU behind it; without padding given, stride 1 keeps the size."""
    if padding is None:
        padding = kernel // 2 if isinstance(kernel, int) else (kernel[0] // 2, kernel[1] // 2)

    def layer(channels: int, width: float) -> tuple[nn.Module, int]:
        out = _scaled(filters, width)
        made: list[nn.Module] = [_drawn(nn.Conv2d(channels, out, kernel, stride, padding, bias=bias))]
        made += [nn.BatchNorm2d(out, eps)] * norm + [nn.ReLU(inplace=True)] * relu
        return nn.Sequential(*made), out

    return layer


def linear(features: int) -> Layer:
    """Return a linear layer and ReLU."""

    def layer(channels: int, width: float) -> tuple[nn.Module, int]:
        out = _scaled(features, width)
        return nn.Sequential(_drawn(nn.Linear(channels, out)), nn.ReLU(inplace=True)), out

    return layer


def pooled(size: int) -> Layer:
    """Return average pooling to size x size pixels, each of which becomes features of its own."""
    return lambda channels, _: (nn.Sequential(nn.AdaptiveAvgPool2d(size), nn.Flatten()), channels * size**2)


def scores(classes: int) -> Layer:
    """Return a linear layer to classes, which starts near equal probabilities."""

    def layer(channels: int, _width: float) -> tuple[nn.Module, int]:
        module = nn.Linear(channels, classes)
        nn.init.normal_(module.weight, std=0.01)
        nn.init.zeros_(module.bias)
        return module, classes

    return layer


def chain(*layers: Layer | nn.Module) -> Layer:
    """Return layers one after the other; a module among them keeps the number of channels."""

    def layer(channels: int, width: float) -> tuple[nn.Module, int]:
        modules = []
        for one in layers:
            module, channels = (one, channels) if isinstance(one, nn.Module) else one(channels, width)
            modules.append(module)
        return nn.Sequential(*modules), channels

    return layer


class Branches(nn.ModuleList):
    """Modules that receive the same input; their outputs lie side by side in the channels."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self], 1)


def branches(*layers: Layer | nn.Module) -> Layer:
    def layer(channels: int, width: float) -> tuple[nn.Module, int]:
        made = [chain(one)(channels, width) for one in layers]
        return Branches(module for module, _ in made), sum(out for _, out in made)

    return layer


class Supervised(nn.Module):
    """Stages with a classifier behind each: in training all have scores, the last one's first; else only the last."""

    def __init__(self, stages: Sequence[Layer], heads: Sequence[Layer], channels: int, width: float) -> None:
        super().__init__()
        self.stages, self.heads = nn.ModuleList(), nn.ModuleList()
        for stage, head in zip(stages, heads, strict=True):
            module, channels = stage(channels, width)
            self.stages.append(module)
            self.heads.append(head(channels, width)[0])

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        if not self.training:
            return self.heads[-1](nn.Sequential(*self.stages)(x))
        found = []
        for stage, head in zip(self.stages, self.heads, strict=True):
            x = stage(x)
            found.insert(0, head(x))
        return found


class Recipe(NamedTuple):
    """How a model of images is trained: AdamW, with a learning rate that rises and falls."""

    size: int
    """Height and width of the images, in pixels."""
    steps: int
    batch: int
    rate: float
    """The highest learning rate."""


def train_classifier(
    make: Callable[[], nn.Module], recipe: Recipe, policy: polyamp.Policy, seed: int
) -> dict[str, float]:
    """Train a model on digits, and return what it reaches on the other ones."""
    model = seeded(make, seed).to(memory_format=torch.channels_last)  # as Tensor Cores want it
    digits = images(size=recipe.size)
    fit(
        model,
        loss_of,
        batches(digits.train, recipe.batch, recipe.steps, seed),
        torch.optim.AdamW(model.parameters(), recipe.rate, betas=(0.9, 0.99)),
        policy,
        schedule=lambda opt: OneCycleLR(opt, recipe.rate, recipe.steps, pct_start=0.2, cycle_momentum=False),
        max_grad_norm=1.0,
    )
    return evaluate(model, metrics_of, batches(digits.test, 250, 10, seed), policy)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross entropy, with 0.3 of each auxiliary classifier's (Szegedy et al., 2015)."""
    found = model(_channels_first(batch[0]))
    losses = [cross_entropy(one, batch[1].long()) for one in (found if isinstance(found, list) else [found])]
    return losses[0] + 0.3 * sum(losses[1:])


def metrics_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    found, labels = model(_channels_first(batch[0])), batch[1].long()
    return {"accuracy": (found.argmax(1) == labels).float().mean(), "loss": cross_entropy(found, labels)}


def _channels_first(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2)


def _scaled(channels: int, width: float) -> int:
    return max(1, round(channels * width))


def _drawn(module: nn.Conv2d | nn.Linear) -> nn.Module:
    """Return a module with weights as in He et al., "Delving Deep into Rectifiers" (2015)."""
    nn.init.orthogonal_(module.weight, 2**0.5)
    if module.bias is not None:
        nn.init.zeros_(module.bias)
    return module
