"""Mask R-CNN of the founding tables: RoIAlign, boxes, losses and metric by hand, and coordinates under every policy."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import polyamp

sys.path.append(str(Path(__file__).parents[3] / "examples"))

from models.data import scenes
from models.on_torch import mask_rcnn, proposals
from models.on_torch.mask_rcnn import SMALL, MaskRCNN
from models.on_torch.roi_align import roi_align
from models.on_torch.training import seeded

pytestmark = pytest.mark.slow

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


def suppressed(boxes: Tensor, scores: Tensor, threshold: float) -> list[int]:
    """Return what the greedy rule keeps, box by box."""
    kept: list[int] = []
    for place in scores.argsort(descending=True, stable=True).tolist():
        if not kept or (proposals.overlaps(boxes[place : place + 1], boxes[kept]) <= threshold).all():
            kept.append(place)
    return kept


@pytest.mark.parametrize("seed", range(5))
def test_suppression_of_all_boxes_together_is_the_greedy_rule(seed: int) -> None:
    boxes, scores = random_boxes(200, 30.0, seed), torch.from_numpy(np.random.default_rng(seed).integers(0, 50, 200))
    assert proposals.nms(boxes, scores, 0.3).tolist() == suppressed(boxes, scores, 0.3)
    groups = torch.arange(200) % 3
    apart = [
        place
        for group in range(3)
        for place in np.flatnonzero(groups == group)[suppressed(boxes[groups == group], scores[groups == group], 0.3)]
    ]
    assert sorted(proposals.nms(boxes, scores, 0.3, groups).tolist()) == sorted(apart)


def objects(*places: int, scores: list[float] | None = None, labels: list[int] | None = None) -> proposals.Objects:
    """Return objects with masks of four pixels in a row, from these places on."""
    masks = torch.zeros(len(places), 1, 16, dtype=torch.bool)
    for mask, place in zip(masks, places, strict=True):
        mask[0, place : place + 4] = True
    named = {"masks": masks, "labels": torch.tensor(labels or [1] * len(places))}
    return named | ({"scores": torch.tensor(scores)} if scores else {})


def test_average_precision_by_hand() -> None:
    precision = mask_rcnn.average_precision
    true = [objects(0, 8)]
    assert precision([objects(0, 8, scores=[0.9, 0.8])], true) == 1
    assert precision([objects(0, 8, 4, scores=[0.9, 0.8, 0.1])], true) == 1  # a wrong one after all others
    assert precision([objects(4, 0, 8, scores=[0.9, 0.8, 0.7])], true) == pytest.approx(2 / 3)  # 1/2, then 2/3
    assert precision([objects(0, 0, 8, scores=[0.9, 0.8, 0.7])], true) == pytest.approx((1 + 2 / 3) / 2)  # found twice
    assert precision([objects(1, scores=[0.9])], true) == 0.5  # 3 of 5 pixels overlap
    assert precision([objects(2, scores=[0.9])], true) == 0  # 2 of 6
    assert precision([objects(0, 8, scores=[0.9, 0.8], labels=[1, 2])], true) == 0.5
    two = [objects(0, 8, labels=[1, 2])]
    assert precision([objects(0, 8, scores=[0.9, 0.8], labels=[1, 1])], two) == 0.5  # the mean over both classes


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
