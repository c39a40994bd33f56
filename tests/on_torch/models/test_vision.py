"""The models of images: published sizes, convolutions in 16 bits, data that is real and the same every time."""

from __future__ import annotations

import doctest
import math
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import polyamp

sys.path.append(str(Path(__file__).parents[3] / "examples"))

from models.data import images, scenes
from models.on_torch import mask_rcnn, proposals
from models.on_torch.mask_rcnn import SMALL, MaskRCNN
from models.on_torch.roi_align import roi_align
from models.on_torch.training import seeded

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


@pytest.mark.parametrize("name", ["data", "founding", "on_torch.training", "on_torch.vision", "on_torch.products"])
def test_the_examples_of_the_shared_code_run(name: str) -> None:
    found = doctest.testmod(import_module(f"models.{name}"))
    assert found.attempted
    assert not found.failed


def test_no_test_image_is_among_those_that_train() -> None:
    digits = images(size=28)
    trained = {image.tobytes() for image in digits.train.x}
    assert sum(image.tobytes() in trained for image in digits.test.x) == 0
    assert np.bincount(digits.test.y).min() > 200


# Mask R-CNN: RoIAlign by hand, boxes and losses in float32 under every policy.

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")


def sampled(features: np.ndarray, y: float, x: float) -> np.ndarray:
    """Return the bilinear sample as RoIAlign defines it, for one place at a time."""
    height, width = features.shape[1:]
    if not (-1 <= y <= height and -1 <= x <= width):
        return np.zeros(len(features))
    y, x = min(max(y, 0), height - 1), min(max(x, 0), width - 1)
    top, left = int(y), int(x)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    upper = features[:, top, left] * (1 - x + left) + features[:, top, right] * (x - left)
    lower = features[:, bottom, left] * (1 - x + left) + features[:, bottom, right] * (x - left)
    return upper * (1 - y + top) + lower * (y - top)


def by_hand(features: np.ndarray, box: np.ndarray, size: int, scale: float) -> np.ndarray:
    x0, y0, x1, y1 = box * scale
    wide, high = max(x1 - x0, 1) / size, max(y1 - y0, 1) / size
    places = [(row, column) for row in range(size) for column in range(size)]
    quarters = [(a, b) for a in (0.25, 0.75) for b in (0.25, 0.75)]
    bins = [
        np.mean([sampled(features, y0 + (row + a) * high, x0 + (column + b) * wide) for a, b in quarters], axis=0)
        for row, column in places
    ]
    return np.reshape(np.transpose(bins), (-1, size, size))


def random_boxes(count: int, side: float, seed: int = 0) -> Tensor:
    places = np.random.default_rng(seed).uniform(0, side, (count, 2, 2))
    places.sort(axis=1)
    return torch.from_numpy(places.reshape(count, 4).astype(np.float32))


def test_roi_align_agrees_with_its_definition_also_at_edges_and_in_tiny_boxes() -> None:
    features = np.random.default_rng(0).normal(size=(2, 3, 9, 7)).astype(np.float32)
    special = [[-9.0, -9, 40, 60], [3, 3, 3.5, 3.25], [20, 30, 27.9, 35.9], [26, 34, 60, 70], [-60, 0, -30, 9]]
    boxes = torch.cat([random_boxes(12, 28.0), torch.tensor(special)])
    images = torch.arange(len(boxes)) % 2
    found = roi_align(torch.from_numpy(features), boxes, images, 3, 0.25)
    wanted = [by_hand(features[image], box, 3, 0.25) for image, box in zip(images, boxes.double().numpy(), strict=True)]
    np.testing.assert_allclose(found, np.array(wanted), atol=2e-5)


@pytest.mark.parametrize("low", [torch.float32, torch.float16, torch.bfloat16])
def test_boxes_stay_float32_where_the_network_returns_16_bits(low: torch.dtype) -> None:
    reference = torch.tensor([[1300.25, 700.5, 1331.75, 760.5]])
    found = proposals.decode(torch.zeros(1, 4, dtype=low), reference)
    assert found.dtype == torch.float32
    assert torch.equal(found, reference)  # in float16, 1300.25 would be 1300 and 1331.75 would be 1332
    deltas = torch.tensor([[0.3, -0.2, 0.7, -0.4]]).to(low)
    assert torch.equal(proposals.decode(deltas, reference), proposals.decode(deltas.float(), reference))


def test_published_model_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        model = mask_rcnn.freeze(MaskRCNN())
    assert sum(one.numel() for one in model.parameters()) == 44_401_393


@pytest.fixture(scope="module")
def batch() -> tuple[Tensor, list[proposals.Objects]]:
    return mask_rcnn.batch(scenes(2, objects=3))


@pytest.mark.parametrize("name", POLICIES)
def test_five_losses_and_boxes_in_float32_under_every_policy(name: str, batch: tuple) -> None:
    model = seeded(lambda: MaskRCNN(SMALL), 0)
    with polyamp.autocast(name):
        assert proposals.decode(torch.zeros(1, 4), torch.ones(1, 4)).dtype == torch.float32
        losses = model(*batch)
        found = model.detect(batch[0], threshold=0.0, most=5)
    assert losses.keys() == {"objectness", "proposed_boxes", "classes", "boxes", "masks"}
    assert all(loss.dtype == torch.float32 for loss in losses.values())
    assert losses["objectness"].item() == pytest.approx(math.log(2), abs=0.1)  # nothing is known yet
    assert losses["classes"].item() == pytest.approx(math.log(11), abs=0.1)
    for one in found:
        assert one["boxes"].dtype == one["scores"].dtype == torch.float32
        assert one["masks"].shape == (5, 128, 128)
