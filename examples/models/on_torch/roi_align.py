"""Move features into boxes, and masks out of boxes, at exact fractional places: RoIAlign of Mask R-CNN.

Boxes are float32 corners x0, y0, x1, y1 in pixels, of shape [boxes, 4]. Under mixed precision they must stay float32:
from 1024 on float16 has steps of 1, so places in an image of 1333 pixels would move by up to half a pixel.

>>> ramp = torch.arange(8.0).expand(1, 1, 8, 8)  # the feature at x is x
>>> roi_align(ramp, torch.tensor([[2.0, 2.0, 6.0, 6.0]]), torch.tensor([0]), size=2)[0, 0]
tensor([[3., 5.],
        [3., 5.]])
"""

import torch
import torch.nn.functional as F
from torch import Tensor

SAMPLES = 2
"""Samples along each side of a bin."""


def roi_align(features: Tensor, boxes: Tensor, images: Tensor, size: int, scale: float = 1.0) -> Tensor:
    """Return the mean of four bilinear samples in each bin of each box, of shape [boxes, channels, size, size].

    This is torchvision's ``roi_align`` with ``sampling_ratio=2`` and ``aligned=False``: the value at the index i is at
    the place i, and a box is at least one feature wide and high. A sample outside is that at the edge, or 0 if it is
    more than one feature away. A bin is a weighted sum of 16 features, in float32 as there, because each feature's
    gradient is a sum over many boxes.

    Args:
        features: of shape [images, channels, height, width].
        boxes: in pixels.
        images: the image of each box.
        size: number of bins along each side.
        scale: features per pixel.
    """
    channels, height, width = features.shape[1:]
    low, extent = boxes[:, :2] * scale, ((boxes[:, 2:] - boxes[:, :2]) * scale).clamp(min=1)
    middles = (torch.arange(size * SAMPLES, device=boxes.device) + 0.5) / (size * SAMPLES)
    x, y = (low[..., None] + extent[..., None] * middles).unbind(1)  # each [boxes, samples]
    (column, across), (row, down) = _neighbours(x, width, size), _neighbours(y, height, size)
    row = (images[:, None, None] * height + row) * width
    index = row[:, :, None, :, None] + column[:, None, :, None]  # [boxes, size, size, 4, 4]
    weight = down[:, :, None, :, None] * across[:, None, :, None]
    places = features.float().permute(0, 2, 3, 1).reshape(-1, channels)
    bins = F.embedding_bag(index.reshape(-1, 16), places, per_sample_weights=weight.reshape(-1, 16), mode="sum")
    return bins.reshape(len(boxes), size, size, channels).permute(0, 3, 1, 2)


def _neighbours(places: Tensor, side: int, size: int) -> tuple[Tensor, Tensor]:
    """Return the indices beside the samples of each bin along one axis, and their weights: each [boxes, size, 4]."""
    away = (places < -1) | (places > side)
    places = places.clamp(0, side - 1)
    first = places.floor()
    index = torch.stack((first, (first + 1).clamp(max=side - 1)), -1).long()
    weight = torch.stack((1 - (places - first), places - first), -1) / SAMPLES
    weight = weight.masked_fill(away[..., None], 0)
    return index.unflatten(1, (size, SAMPLES)).flatten(2), weight.unflatten(1, (size, SAMPLES)).flatten(2)


def paste(masks: Tensor, boxes: Tensor, height: int, width: int) -> Tensor:
    """Return masks of shape [boxes, height, width], 0 outside the boxes, from those of shape [boxes, size, size]."""
    x, y = (torch.arange(side, device=boxes.device) + 0.5 for side in (width, height))  # the middles of pixels
    (x0, y0), (x1, y1) = boxes[:, :2, None].unbind(1), boxes[:, 2:, None].unbind(1)
    across, down = 2 * (x - x0) / (x1 - x0) - 1, 2 * (y - y0) / (y1 - y0) - 1
    shape = (len(boxes), height, width)
    grid = torch.stack((across[:, None, :].expand(shape), down[:, :, None].expand(shape)), -1)
    return F.grid_sample(masks[:, None], grid, align_corners=False)[:, 0]
