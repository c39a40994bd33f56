"""The models of images: published sizes, the same training under every policy, convolutions in 16 bits."""

from __future__ import annotations

import doctest
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import polyamp

sys.path.append(str(Path(__file__).parents[3] / "examples"))

from models.data import images
from models.on_torch.training import batches, fit, seeded
from models.on_torch.vision import loss_of

pytestmark = pytest.mark.slow

PUBLISHED = {
    "alexnet": 61_100_840,
    "vgg16": 138_357_544,
    "googlenet": 13_004_888,
    "inception_v2": 11_295_240,
    "inception_v3": 27_161_264,
    "resnet50": 25_557_032,
}
"""Parameters; of Inception v2 those of the Caffe model, of the others torchvision's."""
WITHOUT_AUXILIARY = {"googlenet": 6_624_904, "inception_v3": 23_834_568}
CONVOLUTIONS = {"alexnet": 5, "vgg16": 13, "googlenet": 57, "inception_v2": 69, "inception_v3": 94, "resnet50": 53}
"""Those that make the scores of a trained model."""
WIDTH = {"vgg16": 1 / 16, "inception_v3": 1 / 16}


def module(name: str) -> ModuleType:
    return import_module(f"models.on_torch.{name}")


def small(name: str) -> nn.Module:
    made = getattr(module(name), name)(WIDTH.get(name, 1 / 8), 10, 1)
    return made.to(memory_format=torch.channels_last)


def count(parts: nn.Module) -> int:
    return sum(parameter.numel() for parameter in parts.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_width_has_the_published_number_of_parameters_and_scores(name: str) -> None:
    with torch.device("meta"):
        model = getattr(module(name), name)()
        size = module(name).RECIPE.size
        assert count(model) == PUBLISHED[name]
        assert model.eval()(torch.empty(2, 3, size, size)).shape == (2, 1000)


@pytest.mark.parametrize("name", PUBLISHED)
def test_convolutions_run_in_16_bits(name: str) -> None:
    size = module(name).RECIPE.size
    plan = polyamp.explain(small(name).eval(), torch.randn(1, 1, size, size), policy="mixed_float16", engine="autocast")
    formats = [row["format"] for row in plan.as_dict()["operations"] if row["name"] == "conv"]
    assert formats == ["float16"] * CONVOLUTIONS[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_short_training_in_16_bits_ends_near_float32(name: str) -> None:
    end = {policy: losses(name, policy) for policy in ("float32", "mixed_bfloat16", "mixed_float16")}
    for policy in ("mixed_float16", "mixed_bfloat16"):
        assert end[policy][0] == pytest.approx(end["float32"][0], rel=0.01)
        assert end[policy] == pytest.approx(end["float32"], rel=0.05)  # a norm over 8 numbers enlarges every rounding
    assert end["mixed_float16"] != end["float32"]


def losses(name: str, policy: str) -> list[float]:
    """Return the losses of three steps, at a loss scale at which none is skipped."""
    model, size = seeded(lambda: small(name), 0), module(name).RECIPE.size
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    scale = {"loss_scale": 128} if policy == "mixed_float16" else {}
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    steps = batches(images(size=size).train, 8, 3, 0)
    return fit(model, loss_of, steps, optimizer, polyamp.policy(policy, **scale))


@pytest.mark.parametrize("name", ["training", "vision", "products"])
def test_the_examples_of_the_shared_code_run(name: str) -> None:
    found = doctest.testmod(module(name))
    assert found.attempted > 2
    assert not found.failed
